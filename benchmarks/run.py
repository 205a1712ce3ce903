# SPDX-License-Identifier: Apache-2.0
"""The numbers, unpatched and patched in one run: a JSON, a plot, and tables.

    python benchmarks/run.py UNPATCHED PATCHED --out FOLDER [PART ...]

UNPATCHED and PATCHED are folders that hold the `vllm/` of one release, without the
edits and with them. Writes FOLDER/numbers.json (after each part) and
FOLDER/numbers.png, prints the tables, whether the aims are met, and what is slower
patched. PART leaves out the others:

- eplb: EPLB's exchange over Gloo, see eplb_exchange.py;
- mla: context lengths and SM90 plans, see mla_plan.py;
- engine: whole engines, see engine_speed.py: a dense model on FlashInfer, and from vLLM
  0.30.0 on, a sparse-MLA one. The engines of a model all start at once, and one at a
  time measures: unpatched, patched without the plan guard, patched, and so on, three
  times.

What fails is a row with its error, and the exit code is then 1. Needs an NVIDIA GPU,
matplotlib, pytest, and what vLLM imports. Nothing else may run on that GPU.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engine"))
from engine import SCENARIOS

HERE = Path(__file__).parent
# Seconds that a process may measure, and that engines may take to start: the first to
# need a kernel compiles it.
TIMEOUT, ENGINE_TIMEOUT, START_TIMEOUT = 300, 100, 400
# Of each model: a scenario of tests/engine, and by name what is compared, as a tree and
# options of engine_speed.py. The guard has nothing to do in the second from vLLM 0.31
# on, whose FlashInfer stages MLA plans itself.
MODELS: dict[str, dict[str, tuple[str, ...]]] = {
    "dense-flashinfer": {
        "unpatched": ("unpatched",),
        "patched, guard off": ("patched", "--guard-off"),
        "patched": ("patched",),
    },
    "sparse-mla-graphs": {"unpatched": ("unpatched",), "patched": ("patched",)},
}
RUNS = 3
# What would be measured too.
SWITCHES = (
    "CUDA_LAUNCH_BLOCKING",
    "VLLM_GPU_SYNC_CHECK",
    "VLLM_H2D_RACE_CHECK",
    "VLLM_H2D_RACE_LAG_US",
)


class Child:
    """A process that measures one tree and writes what it found to a file."""

    def __init__(self, tree: Path, script: str, *arguments: str) -> None:
        # Removed with the object.
        self._folder = tempfile.TemporaryDirectory()
        self.result = Path(self._folder.name, "result.json")
        self._log = Path(self._folder.name, "log")
        path = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited = {k: v for k, v in os.environ.items() if k not in SWITCHES}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / script), str(self.result), *arguments],
                env={**inherited, "PYTHONPATH": os.pathsep.join(path)},
                cwd=self._folder.name,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until it has written something, or has ended; end it if it is late."""
        while not self.result.exists() and self._process.poll() is None:
            if time.monotonic() > deadline:
                self.end()
            time.sleep(0.1)

    def finish(self, timeout: float = TIMEOUT) -> dict[str, Any]:
        """Let it measure. What it found, with an `error` unless it ended well."""
        try:
            self._process.communicate(b"\n", timeout)
            ended = f"ended with {self._process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"no end in {timeout} s"
        finally:
            self.end()
        found: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            found = json.loads(self.result.read_text())
        if self._process.returncode or not found:
            lines = self._log.read_text(errors="replace").splitlines() or [""]
            print("\n".join(["", *lines[-30:], ""]), file=sys.stderr)
            found["error"] = f"{ended}: {last_error(lines)}"
        return found

    def end(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def last_error(lines: list[str]) -> str:
    """The last line that names an exception, or else the last."""
    named = [line for line in lines if re.match(r"\s*[\w.]+(Error|Exception)\b", line)]
    return (named or lines)[-1].strip()[:200]


def measure_trees(trees: dict[str, Path], script: str) -> dict[str, Any]:
    return {name: Child(tree, script).finish() for name, tree in trees.items()}


def measure_model(trees: dict[str, Path], model: str) -> list[dict[str, Any]]:
    """All runs of a model, one at a time and in turn, once all have started."""
    children: list[tuple[str, Child]] = []
    try:
        for _ in range(RUNS):
            for form, (tree, *options) in MODELS[model].items():
                child = Child(trees[tree], "engine_speed.py", model, *options)
                children.append((form, child))
        deadline = time.monotonic() + START_TIMEOUT
        for _, child in children:
            child.wait_until_ready(deadline)
        return [
            {"form": form} | child.finish(ENGINE_TIMEOUT) for form, child in children
        ]
    finally:
        for _, child in children:
            child.end()


def measure_engines(trees: dict[str, Path]) -> dict[str, Any]:
    """By model, its runs; a model that this vLLM has no backend for is left out."""
    return {
        model: measure_model(trees, model)
        for model in MODELS
        if (trees["unpatched"] / (SCENARIOS[model].fatal or "")).exists()
    }


PARTS: dict[str, Callable[[dict[str, Path]], dict[str, Any]]] = {
    "eplb": lambda trees: measure_trees(trees, "eplb_exchange.py"),
    "mla": lambda trees: measure_trees(trees, "mla_plan.py"),
    "engine": measure_engines,
}


def release(tree: Path) -> str:
    """The release that a tree says it is; a checkout may not say."""
    with contextlib.suppress(FileNotFoundError):
        text = (tree / "vllm/_version.py").read_text()
        if found := re.search(r"^__version__ = .*?'([^']+)'", text, re.MULTILINE):
            return found[1]
    return "unknown"


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def read_arguments() -> argparse.Namespace:
    """Refuse what cannot be measured, before anything is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("unpatched", type=lambda text: Path(text).resolve())
    parser.add_argument("patched", type=lambda text: Path(text).resolve())
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_intermixed_args()
    for tree in (arguments.unpatched, arguments.patched):
        if not (tree / "vllm/__init__.py").is_file():
            parser.error(f"{tree} holds no vllm/; give the folder that does")
    before, after = release(arguments.unpatched), release(arguments.patched)
    if before != after:
        parser.error(f"vLLM {before} and {after}; give two trees of one release")
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"no part {part}; give some of {', '.join(PARTS)}, or none")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("there is no matplotlib, for the plot; pip install matplotlib")
    if not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU; run this where there is one")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot make {arguments.out} ({error}); give another --out")
    return arguments


def main() -> int:
    arguments = read_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as an interrupt: children end, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    trees = {name: getattr(arguments, name) for name in report.TREES}
    numbers: dict[str, Any] = {
        "vllm": release(arguments.patched),
        "flashinfer": version("flashinfer-python"),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "cores": len(os.sched_getaffinity(0)),
    }
    for part, measure in PARTS.items():
        if part in (arguments.parts or PARTS):
            start = time.monotonic()
            numbers[part] = measure(trees)
            print(f"{part}: {time.monotonic() - start:.0f} s", file=sys.stderr)
            text = json.dumps(numbers, indent=1) + "\n"
            (arguments.out / "numbers.json").write_text(text)
    print(report.text(numbers))
    report.plot(numbers, arguments.out / "numbers.png")
    return int(bool(report.errors(numbers)))


if __name__ == "__main__":
    sys.exit(main())
