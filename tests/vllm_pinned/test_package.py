# SPDX-License-Identifier: Apache-2.0
"""vllm-pinned as a package: the edits travel with it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_an_installed_command_brings_the_edits(
    tree: Callable[[str], Path], tmp_path: Path
) -> None:
    repository, env = Path(__file__).parents[2], tmp_path / "env"
    uv = (sys.executable, "-m", "uv")
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    for command in (
        (*uv, "venv", "--python", sys.executable, env),
        (*uv, "pip", "install", "--python", env / "bin/python", repository),
    ):
        subprocess.run([*map(str, command)], check=True, env=environment)
    done = subprocess.run(
        [env / "bin/vllm-pinned", "status", tree("0.33.0")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert "not patched: needs sm90-sparse-mla-plan" in done.stdout
    (site,) = env.glob("lib/python*/site-packages")
    assert not (site / "vllm").exists()
