# SPDX-License-Identifier: Apache-2.0
"""The command where its output or its user gets in the way."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm_pinned.conftest import Run, files


def redirected(to: str) -> tuple[str, ...]:
    """What runs a command with its output somewhere else."""
    return ("sh", "-c", f'"$@" {to}', "sh")


def test_output_that_nobody_reads(tree: Callable[[str], Path], run: Run) -> None:
    """A closed pipe ends the command without a traceback."""
    done = run("diff", tree("0.29.0"), prefix=redirected("| true"))
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "diff", "apply"])
def test_output_that_cannot_be_written(
    tree: Callable[[str], Path], run: Run, command: str
) -> None:
    done = run(command, tree("0.29.0"), prefix=redirected("> /dev/full"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "writing the output failed (No space left on device)" in line
    assert line.endswith("`vllm-pinned status` says where the tree stands")


@pytest.mark.parametrize("command", ["status", "diff"])
def test_output_that_is_closed(
    tree: Callable[[str], Path], run: Run, command: str
) -> None:
    done = run(command, tree("0.29.0"), prefix=redirected(">&-"))
    assert (done.returncode, done.stderr) == (1, "")


def test_output_that_knows_few_characters(
    tree: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    root = tmp_path / os.fsdecode("é \udcff".encode(errors="surrogateescape"))
    tree("0.29.0").rename(root)
    for encoding in ("ascii", "utf-8"):
        done = run("status", root, env={"PYTHONIOENCODING": encoding})
        assert done.returncode == 1, done.stderr
        assert r"\udcff" in done.stdout.splitlines()[0]


def test_an_interrupt(tree: Callable[[str], Path]) -> None:
    """Here while it waits for another command on the tree."""
    root = tree("0.29.0")
    before = files(root)
    folder = os.open(root, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_pinned", "apply", str(root)],
        stderr=subprocess.PIPE,
        text=True,
        # What runs these tests in the background may ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while f" {process.pid} " not in Path("/proc/locks").read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    os.close(folder)
    assert process.returncode == 128 + signal.SIGINT
    assert said == (
        "vllm-pinned: interrupted; `vllm-pinned status` says where the tree stands\n"
    )
    assert files(root) == before
