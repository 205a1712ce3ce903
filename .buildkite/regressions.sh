#!/usr/bin/env bash
# regressions.sh REGRESSION ...: run files or folders of tests/ on the wheel that the
# build step made. An agent on which they are skipped for want of a GPU or a module, or
# on which none passes, fails the job.
set -euo pipefail
cd "$(dirname "$0")/.."
.buildkite/install.sh
mkdir -p build
# Without this repository's configuration, which is for the tool's own tests.
.venv/vllm/bin/python -P -m pytest -c /dev/null --rootdir tests -p no:cacheprovider -rs \
  --junitxml=build/regressions.xml "$@" | tee build/regressions.log
if grep -E 'needs (an NVIDIA GPU|FlashInfer)"|could not import' build/regressions.xml; then
  echo 'regressions.sh: this agent lacks what a regression needs, see above' >&2
  exit 1
fi
if ! tail -n 1 build/regressions.log | grep -q ' passed'; then
  echo 'regressions.sh: no regression ran; give ones that this hardware can run' >&2
  exit 1
fi
