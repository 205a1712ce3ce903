# SPDX-License-Identifier: Apache-2.0
"""Measure a model's accuracy behind `vllm serve` with lm-evaluation-harness.

    python accuracy.py --threshold 0.8 --out FOLDER MODEL [-- SERVER_OPTION ...]

Starts `vllm serve MODEL SERVER_OPTION ...`, waits until it is healthy, has `lm_eval`
ask it the questions of a task, and ends all that it started, however it ends itself.
FOLDER, which must not exist, gets `server.log` and what lm_eval writes. `vllm` and
`lm_eval` are the ones on PATH.

Exits with 0 where the accuracy is at least the threshold; 1 where it is less, or where
the server or lm_eval fails; 2 on bad input; 128 + N where signal N ends it.
"""

import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
METRIC = "exact_match,flexible-extract"  # the last number of an answer
CONCURRENCY = 50  # requests in flight
# Seconds to end after SIGTERM, and again after SIGKILL. An agent that cancels a job
# grants 9 in all, and then kills this process alone.
GRACE = 3
TAIL = 50  # lines of the server's log that a failure shows

signals: list[int] = []  # that this process got


class Failure(Exception):
    """Why there is no accuracy: the exit code, and a sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threshold", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--include-path", type=Path, help="folder of more tasks")
    parser.add_argument("--limit", type=int, default=200, help="questions")
    parser.add_argument("--port", type=int, default=0, help="a free one if not given")
    parser.add_argument("--start-timeout", type=float, default=1200, help="seconds")
    parser.add_argument("model")
    parser.add_argument("options", nargs="*", metavar="SERVER_OPTION")
    return parser.parse_args(arguments)


def claim_port(port: int) -> int:
    """`port`, or a free one for 0; a Failure where it cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            sentence = f"port {port}: {error}; give another --port, or none"
            raise Failure(2, sentence) from None
        return probe.getsockname()[1]


@contextmanager
def running(command: list[str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, none of which is left afterwards."""
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):  # the group is gone
                os.killpg(process.pid, number)
            deadline = time.monotonic() + GRACE
            while group_exists(process.pid) and time.monotonic() < deadline:
                time.sleep(0.05)


def group_exists(group: int) -> bool:
    with suppress(ChildProcessError):  # none of ours is left
        while os.waitpid(-group, os.WNOHANG)[0]:  # ours count until they are reaped
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait(
    server: subprocess.Popen[bytes],
    done: Callable[[], bool],
    timeout: float = float("inf"),
) -> None:
    """Wait until `done()`; a Failure where the server ends, a signal or the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        if signals:
            name = signal.Signals(signals[0]).name
            raise Failure(128 + signals[0], f"ended by {name}")
        if server.poll() is not None:
            raise Failure(1, f"the server ended with exit code {server.returncode}")
        if done():
            return
        if time.monotonic() > deadline:
            raise Failure(
                1, f"the server is not healthy after {timeout:g} s; see server.log"
            )
        time.sleep(0.2)


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()  # to the end, so that the server sees no reset
        return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def evaluation(arguments: argparse.Namespace, port: int) -> list[str]:
    """The command that asks the server and writes results_*.json below --out."""
    model = {
        "model": arguments.model,
        "base_url": f"http://{HOST}:{port}/v1/completions",
        "num_concurrent": CONCURRENCY,
        "tokenizer_backend": "none",  # prompts are sent as text
    }
    more = arguments.include_path
    return [
        *("lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--tasks", arguments.task, "--limit", str(arguments.limit)),
        *("--output_path", str(arguments.out), "--log_samples"),
        *(("--include_path", str(more)) if more else ()),
    ]


def measure(arguments: argparse.Namespace, port: int) -> None:
    """Serve the model and evaluate it; results are in --out when this returns."""
    serve = ["vllm", "serve", arguments.model, "--host", HOST, "--port", str(port)]
    with (
        (arguments.out / "server.log").open("wb") as log,
        running([*serve, *arguments.options], log) as server,
    ):
        wait(server, lambda: healthy(port), arguments.start_timeout)
        # In the server's group: whatever ends the one ends the other, at once.
        client = subprocess.Popen(evaluation(arguments, port), process_group=server.pid)
        wait(server, lambda: client.poll() is not None)
        if client.returncode:
            raise Failure(1, f"lm_eval ended with exit code {client.returncode}")


def read_accuracy(arguments: argparse.Namespace) -> tuple[float, int]:
    """The accuracy that lm_eval found, 0 to 1, and of how many questions."""
    (file,) = arguments.out.rglob("results_*.json")
    found = json.loads(file.read_text())
    questions = found["n-samples"][arguments.task]["effective"]
    return found["results"][arguments.task][METRIC], questions


def main() -> int:
    arguments = parse()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # which nohup makes it
            # Only noted: nothing that ends a process is itself cut short.
            signal.signal(number, lambda number, _: signals.append(number))
    log = arguments.out / "server.log"
    try:
        for command in ("vllm", "lm_eval"):
            if not shutil.which(command):
                raise Failure(2, f"there is no {command} on PATH; install it")
        port = claim_port(arguments.port)
        try:
            arguments.out.mkdir(parents=True)
        except OSError as error:
            sentence = f"{arguments.out}: {error.strerror}; give a new folder as --out"
            raise Failure(2, sentence) from None
        measure(arguments, port)
    except Failure as failure:
        if failure.code != 2 and log.exists():
            lines = log.read_text(errors="replace").splitlines()
            print("--- the end of server.log", *lines[-TAIL:], sep="\n")
        print(f"accuracy.py: {failure}", file=sys.stderr)
        return failure.code
    accuracy, questions = read_accuracy(arguments)
    passed = accuracy >= arguments.threshold
    verdict = "at least" if passed else "LESS THAN"
    print(f"accuracy {accuracy:.3f} of {questions} questions, ", end="")
    print(f"{verdict} {arguments.threshold:g}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
