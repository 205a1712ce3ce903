# SPDX-License-Identifier: Apache-2.0
"""The regressions on whole installations of vLLM, unpatched and patched by the tool."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*command: object, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("release", ["0.29.0", "0.33.0"])
def test_regressions_fail_unpatched_and_pass_patched(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What this machine can run of them; without a GPU, each skip says so."""
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    uv, env = (sys.executable, "-m", "uv"), tmp_path / "env"
    python = env / "bin/python"
    run(*uv, "venv", "--python", sys.executable, env, env=environment)
    install = (*uv, "pip", "install", "--python", python)
    run(*install, f"vllm=={release}", "pytest", env=environment)
    (site,) = env.glob("lib/python*/site-packages")
    unpatched, patched = tmp_path / "unpatched", tmp_path / "patched"
    for tree in (unpatched, patched):
        tree.mkdir()
        shutil.copytree(site / "vllm", tree / "vllm", copy_function=os.link)
    run(sys.executable, "-m", "vllm_pinned", "apply", patched)
    said = run(python, HERE / "run.py", unpatched, patched, env=environment)
    with capsys.disabled():
        print(f"\nvLLM {release}: {said[said.rindex('patched: ') :]}")
    assert re.search(r"patched: .*\d+ passed", said)
    shutil.rmtree(env)  # 9 GB
