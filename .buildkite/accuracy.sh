#!/usr/bin/env bash
# Run accuracy.py, with its arguments, on the wheel that the build step made.
set -euo pipefail
cd "$(dirname "$0")/.."
.buildkite/install.sh
# Apart from vLLM, so that neither's dependencies move the other's.
"${PYTHON:-python3}" -m venv .venv/eval
.venv/eval/bin/pip install --quiet 'lm-eval[api]==0.4.13'
export PATH="$PWD/.venv/vllm/bin:$PWD/.venv/eval/bin:$PATH"
exec python .buildkite/accuracy.py "$@"
