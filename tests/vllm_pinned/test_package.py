# SPDX-License-Identifier: Apache-2.0
"""vllm-pinned as a package: edits, modules and regressions travel with it."""

from collections.abc import Callable
from pathlib import Path

from tests.vllm_pinned.conftest import (
    NOTE,
    NOTE_MODULE,
    NOTE_TEST,
    ROOT,
    make_env,
    must,
)
from vllm_pinned.edits import load_edits


def test_an_installed_command_brings_the_edits(
    tree: Callable[[str], Path], fork: Path, tmp_path: Path
) -> None:
    env, root = tmp_path / "env", tree("0.29.0")
    make_env(env, fork)
    assert "applied to " in must(env / "bin/vllm-pinned", "apply", root)
    assert (
        b"pin_memory=PIN_MEMORY"
        in (root / "vllm/distributed/eplb/eplb_communicator.py").read_bytes()
    )
    assert (root / NOTE).read_text() == NOTE_MODULE
    (site,) = env.glob("lib/python*/site-packages")
    assert not (site / "vllm").exists()
    packed = site / "vllm_pinned/edits"
    ours = {edit.id for edit in load_edits(ROOT)}
    assert {edit.id for edit in load_edits(packed)} == {*ours, "staging-note"}
    for edit in load_edits(packed):
        assert edit.own(edit.regression)
    assert (packed / NOTE_TEST).is_file()
