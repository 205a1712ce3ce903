# SPDX-License-Identifier: Apache-2.0
"""regressions.sh, on regressions of its own and the stand-in's wheel."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.buildkite.conftest import Job

PASSES = """\
from importlib.metadata import version

def test_the_wheel_is_the_one():
    assert version("vllm") == "0.33.0+pinned.4"
"""
NO_GPU = """
import pytest

@pytest.mark.skipif(True, reason="needs an NVIDIA GPU")
def test_copies():
    pass
"""
OTHER_RELEASE = NO_GPU.replace("needs an NVIDIA GPU", "this release has none")
NO_FLASHINFER = NO_GPU.replace("an NVIDIA GPU", "FlashInfer")
NO_MODULE = """
import pytest

def test_the_guard():
    pytest.importorskip("vllm.utils.flashinfer_plan_guard")
"""
FAILS = """
def test_waits():
    assert False
"""


def run(job: Job, text: str) -> tuple[int, str]:
    """Run a regression of this text: the exit code, and what it says of it."""
    regression = job.folder / "tests/v1/test_it.py"
    regression.parent.mkdir(parents=True, exist_ok=True)
    regression.write_text(text)
    done = job.run(".buildkite/regressions.sh", "tests/v1/test_it.py")
    report = ET.parse(job.folder / "build/regressions.xml")
    assert len(list(report.iter("testcase"))) == text.count("def test_")
    return done.returncode, done.stderr


def test_it_installs_the_wheel_and_runs(job: Job) -> None:
    assert run(job, PASSES) == (0, "")


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (PASSES + OTHER_RELEASE, 0, ""),
        (PASSES + FAILS, 1, ""),
        (PASSES + NO_GPU, 1, "this agent lacks what a regression needs, see above"),
        (
            PASSES + NO_FLASHINFER,
            1,
            "this agent lacks what a regression needs, see above",
        ),
        (PASSES + NO_MODULE, 1, "this agent lacks what a regression needs, see above"),
        (OTHER_RELEASE, 1, "no regression ran; give ones that this hardware can run"),
        ("", 5, ""),  # pytest's code for no tests
    ],
)
def test_it_fails_where_they_fail_or_do_not_run(
    installed: Job, text: str, code: int, sentence: str
) -> None:
    assert run(installed, text) == (
        code,
        f"regressions.sh: {sentence}\n" if sentence else "",
    )


def test_it_fails_without_the_wheel(tmp_path: Path) -> None:
    job = Job(tmp_path)
    (tmp_path / "bin/buildkite-agent").write_text("#!/bin/sh\nexit 1\n")
    assert job.run(".buildkite/regressions.sh", "tests/v1").returncode == 1
