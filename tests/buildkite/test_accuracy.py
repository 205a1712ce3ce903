# SPDX-License-Identifier: Apache-2.0
"""accuracy.sh and accuracy.py for real: lm_eval, and a stand-in for `vllm serve`."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.buildkite.conftest import Job

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{{{one}}}} plus {{{{other}}}}?"
doc_to_target: "{{{{one + other}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false}}
filter_list:
  - name: flexible-extract
    filter:
      - {{function: regex, group_select: -1, regex_pattern: '(\\d+)'}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
QUESTIONS = 10


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the task `sums`: what is 0 plus 7, 1 plus 7, and so on."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = folder / "questions.json"
    questions.write_text(
        json.dumps([{"one": number, "other": 7} for number in range(QUESTIONS)])
    )
    (folder / "sums.yaml").write_text(TASK.format(questions=questions))
    return folder


class Accuracy:
    """Calls of accuracy.py, each for a model whose name no other process has."""

    def __init__(self, job: Job, tasks: Path, folder: Path) -> None:
        self.job, self.tasks, self.out = job, tasks, folder / "out"
        self.model = f"model-{folder.name}-{os.getpid()}"
        environment = job.folder / ".venv"
        self.path = f"{environment}/vllm/bin:{environment}/eval/bin"
        # No signal is ignored, whatever these tests run under.
        clean = ("env", "--default-signal", f"PATH={self.path}")
        self.script = (*clean, "python", ".buildkite/accuracy.py")

    def arguments(self, *server: object, **options: object) -> list[str]:
        named = {
            "threshold": 0.8,
            "out": self.out,
            "task": "sums",
            "include_path": self.tasks,
            "limit": QUESTIONS,
            **options,
        }
        return [
            *(f"--{name.replace('_', '-')}={value}" for name, value in named.items()),
            *(self.model, "--", *map(str, server)),
        ]

    def left(self) -> list[str]:
        """The command lines of processes that name the model or the results."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if self.model in line or str(self.out) in line:
                found.append(line)
        return found


@pytest.fixture
def accuracy(job: Job, tasks: Path, tmp_path: Path) -> Accuracy:
    return Accuracy(job, tasks, tmp_path)


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.05)


def test_the_whole_job_passes_at_the_threshold(accuracy: Accuracy) -> None:
    """From the wheel to the verdict; the server takes a while to be healthy."""
    done = accuracy.job.run(
        ".buildkite/accuracy.sh",
        *accuracy.arguments("--right", 8, "--healthy-after", 2),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy 0.800 of 10 questions, at least 0.8\n" in done.stdout
    log = (accuracy.out / "server.log").read_text()
    assert log.count("asked") == QUESTIONS
    assert "What is 9 plus 7?" in log
    (results,) = accuracy.out.rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["sums"]
    assert list(accuracy.out.rglob("samples_sums_*.jsonl"))
    assert not accuracy.left()


def test_less_than_the_threshold_fails(accuracy: Accuracy) -> None:
    """Also with a server and a child that do not listen to SIGTERM."""
    done = accuracy.job.run(
        *accuracy.script, *accuracy.arguments("--right", 7, "--deaf")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "accuracy 0.700 of 10 questions, LESS THAN 0.8\n" in done.stdout
    assert not accuracy.left()


def test_a_server_that_dies_at_start_ends_it_at_once(accuracy: Accuracy) -> None:
    started = time.monotonic()
    done = accuracy.job.run(*accuracy.script, *accuracy.arguments("--dies", "at-start"))
    assert time.monotonic() - started < 10
    assert done.returncode == 1
    assert done.stderr == "accuracy.py: the server ended with exit code 1\n"
    assert done.stdout.endswith("stand-in: started\nstand-in: no weights\n")
    assert not accuracy.left()


def test_a_server_that_dies_later_ends_it_at_once(accuracy: Accuracy) -> None:
    """Before lm_eval has tried again, which it does for longer than this test has."""
    done = accuracy.job.run(
        *accuracy.script, *accuracy.arguments("--dies", "at-question")
    )
    assert done.returncode == 1
    assert done.stderr.endswith("accuracy.py: the server ended with exit code 9\n")
    assert done.stdout.endswith("stand-in: out of memory\n")
    assert not list(accuracy.out.rglob("results_*.json"))
    assert not accuracy.left()


def test_a_server_that_never_gets_healthy_fails(accuracy: Accuracy) -> None:
    done = accuracy.job.run(
        *accuracy.script,
        *accuracy.arguments("--healthy-after", 600, start_timeout=2),
    )
    assert done.returncode == 1
    assert done.stderr == (
        "accuracy.py: the server is not healthy after 2 s; see server.log\n"
    )
    assert "stand-in: started" in done.stdout
    assert not accuracy.left()


def test_an_evaluation_that_fails_fails(accuracy: Accuracy) -> None:
    done = accuracy.job.run(*accuracy.script, *accuracy.arguments("--refuses"))
    assert done.returncode == 1
    assert done.stderr.endswith("accuracy.py: lm_eval ended with exit code 1\n")
    assert not accuracy.left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("when", ["starting", "asking"])
def test_a_signal_ends_all_that_was_started(
    accuracy: Accuracy, when: str, number: signal.Signals
) -> None:
    """A second one, as of an impatient user, does not cut that short."""
    options = ["--healthy-after", 600] if when == "starting" else ["--hangs"]
    job = accuracy.job.start(*accuracy.script, *accuracy.arguments(*options))
    log, sign = (
        accuracy.out / "server.log",
        "started" if when == "starting" else "asked",
    )
    try:
        until(lambda: log.exists() and sign in log.read_text())
        assert len(accuracy.left()) >= (3 if when == "starting" else 4)
        for _ in range(2):
            job.send_signal(number)
        _, err = job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode == 128 + number
    assert err.endswith(f"accuracy.py: ended by {number.name}\n")
    assert not accuracy.left()


def test_it_outlives_its_terminal_under_nohup(accuracy: Accuracy) -> None:
    script = [*accuracy.script[:3], "/usr/bin/nohup", *accuracy.script[3:]]
    job = accuracy.job.start(*script, *accuracy.arguments("--healthy-after", 600))
    log = accuracy.out / "server.log"
    try:
        until(lambda: log.exists() and "started" in log.read_text())
        job.send_signal(signal.SIGHUP)
        time.sleep(1)
        job.terminate()
        _, err = job.communicate(timeout=30)
    finally:
        job.kill()
    assert err.endswith("accuracy.py: ended by SIGTERM\n")


def test_a_canceled_job_ends_in_time(accuracy: Accuracy, tmp_path: Path) -> None:
    """Nothing listens to SIGTERM. An agent kills the job, and that alone, after 9 s."""
    evaluator = tmp_path / "bin/lm_eval"
    evaluator.parent.mkdir()
    evaluator.write_text("#!/bin/sh\ntrap '' TERM\n/bin/sleep 600\n")
    evaluator.chmod(0o755)
    script = [
        part.replace("PATH=", f"PATH={evaluator.parent}:") for part in accuracy.script
    ]
    job = accuracy.job.start(*script, *accuracy.arguments("--deaf"))
    try:
        until(lambda: any(str(evaluator) in line for line in accuracy.left()))
        job.terminate()
        started = time.monotonic()
        job.communicate(timeout=30)
        assert time.monotonic() - started < 8
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGTERM
    assert not accuracy.left()


def test_a_port_in_use_is_refused(accuracy: Accuracy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = accuracy.job.run(*accuracy.script, *accuracy.arguments(port=port))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"accuracy.py: port {port}: [Errno 98] Address already in use; "
        "give another --port, or none\n"
    )
    assert not accuracy.out.exists()


def test_the_port_that_is_given_is_taken(accuracy: Accuracy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = accuracy.job.start(*accuracy.script, *accuracy.arguments(port=port))
    try:
        until(lambda: any(f"--port {port}" in line for line in accuracy.left()))
        job.terminate()
        job.communicate(timeout=30)
    finally:
        job.kill()
    assert not accuracy.left()


def test_results_of_before_are_left_alone(accuracy: Accuracy) -> None:
    accuracy.out.mkdir()
    (accuracy.out / "results_old.json").write_text("{}")
    done = accuracy.job.run(*accuracy.script, *accuracy.arguments())
    assert done.returncode == 2
    assert done.stderr == (
        f"accuracy.py: {accuracy.out}: File exists; give a new folder as --out\n"
    )
    assert [path.name for path in accuracy.out.iterdir()] == ["results_old.json"]


@pytest.mark.parametrize("command", ["vllm", "lm_eval"])
def test_a_missing_command_is_named(accuracy: Accuracy, command: str) -> None:
    name = "eval" if command == "vllm" else "vllm"
    environment = accuracy.job.folder / f".venv/{name}/bin"
    done = accuracy.job.run(
        *("env", f"PATH={environment}", *accuracy.script[3:]), *accuracy.arguments()
    )
    assert done.returncode == 2
    assert done.stderr == (f"accuracy.py: there is no {command} on PATH; install it\n")
    assert not accuracy.out.exists()
