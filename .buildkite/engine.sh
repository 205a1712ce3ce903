#!/usr/bin/env bash
# engine.sh [--race-check] SCENARIO ...: compare what whole engines generate, on the
# released wheel and on the one that the build step made. An agent on which one of them
# cannot start fails the job.
set -euo pipefail
cd "$(dirname "$0")/.."
.buildkite/install.sh
python=.venv/vllm/bin/python
patched=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
release=$("$python" -c 'from importlib.metadata import version as v; print(v("vllm").split("+")[0])')
# With ==, a local version such as the patched one would do, too.
"$python" -m pip install --quiet --upgrade --no-deps --target .venv/released "vllm===$release"
mkdir -p build
"$python" tests/engine/run.py .venv/released "$patched" "$@" \
  --json build/engine.json | tee build/engine.log
if grep -q 'cannot start: ' build/engine.log; then
  echo 'engine.sh: an engine cannot start here, see above' >&2
  exit 1
fi
