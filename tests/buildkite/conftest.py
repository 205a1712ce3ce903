# SPDX-License-Identifier: Apache-2.0
"""A checkout as an agent has it, and an agent whose wheel is a stand-in for vLLM."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELEASED, PATCHED = "0.33.0", "0.33.0+pinned.4"
# All that buildkite-agent has to do here. It fails on any other call.
AGENT = """\
#!/usr/bin/env bash
set -euo pipefail
[[ "$*" == 'artifact download dist/*.whl . --step wheel' ]]
mkdir -p dist
cp {wheel} dist/
"""


def write_wheel(folder: Path, version: str) -> Path:
    """A wheel of vLLM's name whose command `vllm` is the stand-in."""
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(Path(__file__).with_name("stand_in.py"), "vllm/stand_in.py")
        wheel.writestr("vllm/__init__.py", "")
        for name, text in {
            "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "entry_points.txt": "[console_scripts]\nvllm = vllm.stand_in:main\n",
            "RECORD": "",
        }.items():
            wheel.writestr(f"vllm-{version}.dist-info/{name}", text)
    return path


def heed_signals() -> None:
    """What runs these tests in the background may ignore them."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """A checkout in which a step's command runs as an agent runs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        shutil.copytree(ROOT / ".buildkite", self.folder / ".buildkite")
        agent = folder / "bin/buildkite-agent"
        agent.parent.mkdir()
        agent.write_text(AGENT.format(wheel=write_wheel(folder, PATCHED)))
        agent.chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": f"{agent.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "HF_HOME": str(folder / "huggingface"),
            "HF_HUB_OFFLINE": "1",
        }
        self.env.pop("PYTEST_ADDOPTS", None)

    def start(self, *command: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*map(str, command)],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=heed_signals,
        )

    def run(
        self, *command: object, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*command)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """After the first call of accuracy.sh, which installs vllm and lm_eval."""
    job = Job(tmp_path_factory.mktemp("job"))
    done = job.run(".buildkite/accuracy.sh", "--help", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--threshold" in done.stdout
    return job


@pytest.fixture
def installed(job: Job, tmp_path: Path) -> Job:
    """A checkout in which install.sh has nothing left to do, which saves time."""
    other = Job(tmp_path)
    (other.folder / ".venv").symlink_to(job.folder / ".venv")
    (other.folder / ".buildkite/install.sh").write_text("#!/bin/sh\n")
    return other
