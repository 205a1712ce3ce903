# SPDX-License-Identifier: Apache-2.0
"""The regressions on whole installations of vLLM, unpatched and patched by the tool."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.vllm_pinned.conftest import make_env, must

HERE = Path(__file__).parent


@pytest.mark.parametrize("release", ["0.29.0", "0.33.0"])
def test_regressions_fail_unpatched_and_pass_patched(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What this machine can run of them; without a GPU, each skip says so."""
    env = tmp_path / "env"
    python = make_env(env, f"vllm=={release}", "pytest")
    (site,) = env.glob("lib/python*/site-packages")
    unpatched, patched = tmp_path / "unpatched", tmp_path / "patched"
    for tree in (unpatched, patched):
        tree.mkdir()
        shutil.copytree(site / "vllm", tree / "vllm", copy_function=os.link)
    must(sys.executable, "-m", "vllm_pinned", "apply", patched)
    said = must(python, HERE / "run.py", unpatched, patched)
    with capsys.disabled():
        print(f"\nvLLM {release}: {said[said.rindex('patched: ') :]}")
    assert re.search(r"patched: .*\d+ passed", said)
    shutil.rmtree(env)  # 9 GB
