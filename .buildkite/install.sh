#!/usr/bin/env bash
# The wheel that the build step made, and what it needs, in .venv/vllm.
set -euo pipefail
cd "$(dirname "$0")/.."
buildkite-agent artifact download 'dist/*.whl' . --step wheel
# An agent that is an image of the release has the dependencies, and DeepEP, already.
"${PYTHON:-python3}" -m venv --clear --system-site-packages .venv/vllm
.venv/vllm/bin/pip install --quiet dist/vllm-*.whl pytest
