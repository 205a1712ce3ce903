# SPDX-License-Identifier: Apache-2.0
"""vllm-pinned as a package: the edits travel with it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.vllm_pinned.conftest import make_env


def test_an_installed_command_brings_the_edits(
    tree: Callable[[str], Path], tmp_path: Path
) -> None:
    env = tmp_path / "env"
    make_env(env, Path(__file__).parents[2])
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
