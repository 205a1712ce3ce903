# SPDX-License-Identifier: Apache-2.0
"""Run whole engines, unpatched and patched, and compare what they generate.

    python tests/engine/run.py UNPATCHED PATCHED [SCENARIO ...]
                               [--race-check] [--json FILE]

UNPATCHED and PATCHED are folders that hold the `vllm/` of one release, without the
edits and with them. SCENARIO, a part of a name in engine.py, leaves out all others.
Each engine runs in a process of its own, several at a time, and generates, mostly more
than once:

- reference: unpatched, with CUDA_LAUNCH_BLOCKING=1, where no copy can be overtaken;
- reference again: the same once more. Some engines are not deterministic: the floor is
  the largest difference between any two generations of these two runs;
- strict: under VLLM_GPU_SYNC_CHECK=error. A tree that dies of it runs again without.
  Where a scenario says why it cannot run under the check, it runs without at once.

With --race-check both trees run with VLLM_H2D_RACE_CHECK=warn instead, which lists
every race where "error" ends at the first, and with copies delayed by 2 ms. PATCHED
brings the check to both.

In scenarios that keep the GPU busy, unpatched may generate something else, and the
table says so. Exits with 1 where one of these does not hold:

- patched generates what the reference does: the same tokens and logprobs where equal
  runs have the same; elsewhere the same tokens up to near ties, and logprobs as close
  as twice the floor or 0.1 nat, whichever is more. The floor must not exceed 1 nat;
- unpatched dies of the strict check where the scenario has a fault for that, and
  generates the same without the check;
- patched does not die of the strict check;
- the race check reports nothing on patched.

In scenarios of EPLB every rank compares all its experts' weights after each rebalance;
a difference, or hardly any rebalance that moves experts, ends the engine.

What can start on neither tree is listed with its error. Needs an NVIDIA GPU of compute
capability 9.x, nvcc, and what vLLM imports; flash-attn is not needed.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("engine.py")
sys.path.insert(0, str(ENGINE.parent))
from engine import SCENARIOS, Scenario  # noqa: E402

TIMEOUT = 300  # seconds, for one process: the first of a machine compiles kernels
JOBS = max(1, (os.cpu_count() or 1) // 2)
RACE_CHECK = "vllm/utils/h2d_race_check.py"
# What a pageable copy does under the strict check.
FAULT = re.compile("non_blocking H2D copy.*not pinned")
# Logprobs, in nats, where equal runs differ at all: tokens closer than that may change
# places, and no less is told apart. A logit is rounded to bfloat16, 0.03 at the sizes
# that occur here.
TOLERANCE = 0.1
# Where two equal runs differ by more, right and wrong ones cannot be told apart.
VACUOUS = 1.0

# Against the reference: tokens, the largest difference of logprobs, and the same
# between generations of the run itself.
COLUMNS = ("tokens", "logprobs", "own", "seconds", "outcome")
ROW = "{:19} {:26} {:>8} {:>9} {:>9}  {}"

REFERENCE = {"CUDA_LAUNCH_BLOCKING": "1"}
STRICT = {"VLLM_GPU_SYNC_CHECK": "error"}
RACES = {"VLLM_H2D_RACE_CHECK": "warn", "VLLM_H2D_RACE_LAG_US": "2000"}
SWITCHES = REFERENCE | STRICT | RACES

engines: set[subprocess.Popen] = set()  # that run


@dataclass(frozen=True)
class Ran:
    """How an engine ended.

    Attributes:
        phase: "start" or "generate" where it died, empty where it did not.
        message: The first line of the error.
        outputs: Of each generation, by request: `tokens`, and at each position the
            best `logprobs` by token.
        races: Where the race check saw one, and how often; None without the check.
        moved: Of each rebalance of EPLB, how many slots got an expert that was not on
            their rank.
        runner: The model runner, V1 or V2.
        seconds: To start, and to generate.
        log: The last lines that the process wrote.

    """

    phase: str = ""
    message: str = ""
    outputs: list[list[dict[str, Any]]] = field(default_factory=list)
    races: dict[str, int] | None = None
    moved: list[int] = field(default_factory=list)
    runner: str = ""
    seconds: tuple[float, float] = (0.0, 0.0)
    log: str = ""

    @property
    def outcome(self) -> str:
        if not self.phase:
            experts = (
                f", {sum(self.moved)} experts moved in {len(self.moved)} rebalances"
            )
            return f"generates ({self.runner})" + (experts if self.moved else "")
        return {"start": "cannot start: ", "generate": "dies: "}[self.phase] + (
            self.message
        )


@dataclass(frozen=True)
class Comparison:
    """How two generations compare.

    Attributes:
        ties: Requests that part where two tokens are as good as equal.
        parted: The first request and position that parts for no such reason.
        logprobs: Largest difference at a position before the requests part, in nats.
        parting: The same where they part, of the two tokens; what came before was equal
            there, too. Infinite where one token is not among the other's best.

    """

    ties: int = 0
    parted: tuple[int, int] | None = None
    logprobs: float = 0.0
    parting: float = 0.0

    @property
    def tokens(self) -> str:
        if self.parted:
            return "request {} differs at {}".format(*self.parted)
        return f"equal, {self.ties} ties" if self.ties else "equal"


def compare(
    one: list[dict[str, Any]],
    other: list[dict[str, Any]],
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare two generations, each request until its tokens part.

    Tokens are as good as equal if they are no more than `tolerance` nats apart in both.
    """
    ties, parted, largest, parting = 0, None, 0.0, 0.0
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        if len(left["tokens"]) != len(right["tokens"]):
            parted = parted or (number, min(len(left["tokens"]), len(right["tokens"])))
        positions = zip(
            left["tokens"],
            right["tokens"],
            left["logprobs"],
            right["logprobs"],
            strict=False,
        )
        for position, (mine, theirs, before, after) in enumerate(positions):
            pair = str(mine), str(theirs)
            if mine == theirs:
                largest = max(largest, _change(before, after, pair[0]))
                continue
            parting = max(parting, *(_change(before, after, each) for each in pair))
            if all(_gap(scores, pair) <= tolerance for scores in (before, after)):
                ties += 1
            else:
                parted = parted or (number, position)
            break
    return Comparison(ties, parted, largest, parting)


def _change(before: dict[str, float], after: dict[str, float], token: str) -> float:
    """How much a logprob changed, infinite where a token is not among the best."""
    return _apart(before.get(token, math.nan), after.get(token, math.nan))


def _gap(scores: dict[str, float], pair: tuple[str, str]) -> float:
    """How far apart two tokens are, infinite where one is not among the best."""
    return _apart(*(scores.get(token, math.nan) for token in pair))


def _apart(one: float, other: float) -> float:
    """How far apart two logprobs are, infinite where one is not a number."""
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def run_engine(name: str, tree: Path, check: Path, environment: dict[str, str]) -> Ran:
    """Run one scenario on a tree."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        path = os.pathsep.join(
            p for p in (str(tree), os.environ.get("PYTHONPATH")) if p
        )
        inherited = {k: v for k, v in os.environ.items() if k not in SWITCHES}
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(ENGINE), name, str(result), str(check)],
                env={**inherited, "PYTHONPATH": path, **environment},
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            engines.add(process)
            try:
                code = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill(process)
                engines.discard(process)
        said = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        written = json.loads(result.read_text()) if result.exists() else {}
        if "outputs" not in written and "error" not in written:
            ended = f"no end in {TIMEOUT} s" if code is None else f"ended with {code}"
            written["error"] = {
                "phase": "generate" if written else "start",
                "message": ended,
            }
        return read(written, said)


def kill(process: subprocess.Popen) -> None:
    """End a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stop(number: int, _: object) -> None:
    """End with all engines, whose sessions the signal does not reach."""
    for process in list(engines):
        kill(process)
    os._exit(128 + number)


def read(result: dict[str, Any], log: str) -> Ran:
    error = result.get("error", {})
    return Ran(
        error.get("phase", ""),
        error.get("message", ""),
        result.get("outputs", []),
        result.get("races"),
        result.get("moved", []),
        result.get("runner", ""),
        (result.get("start_seconds", 0.0), result.get("generate_seconds", 0.0)),
        log,
    )


def run_scenario(
    name: str,
    unpatched: Path,
    patched: Path,
    race_check: bool,
    pool: ThreadPoolExecutor,
) -> dict[str, Ran]:
    """Every run of a scenario, by name; without the strict check where it kills."""
    check = patched / RACE_CHECK
    trees = {"unpatched": unpatched, "patched": patched}

    def start(tree: Path, environment: dict[str, str]) -> Future[Ran]:
        return pool.submit(run_engine, name, tree, check, environment)

    mode, environment = (" raced", RACES) if race_check else (" strict", STRICT)
    if SCENARIOS[name].unchecked and not race_check:
        mode, environment = "", {}
    running = {
        "reference": start(unpatched, REFERENCE),
        "reference again": start(unpatched, REFERENCE),
    } | {f"{label}{mode}": start(tree, environment) for label, tree in trees.items()}
    ran = {label: future.result() for label, future in running.items()}
    again = {
        label: start(tree, {})
        for label, tree in trees.items()
        if mode == " strict" and ran[f"{label} strict"].phase == "generate"
    }
    return ran | {label: future.result() for label, future in again.items()}


def verdict(scenario: Scenario, ran: dict[str, Ran], guards: bool) -> list[str]:
    """What does not hold of a scenario's runs; `guards`, whether the trees differ."""
    reference = ran["reference"]
    if all(run.phase == "start" for run in ran.values()):
        return []
    for label in ("reference", "reference again"):
        if ran[label].phase:
            return [f"the {label} {ran[label].outcome}"]
    floor = floor_of(ran)
    if floor > VACUOUS:
        return [f"vacuous: two equal runs differ by {floor:.2g}"]
    ills = []
    before, after = checked(ran, "unpatched"), checked(ran, "patched")
    if scenario.fatal and guards and before.races is None and not scenario.unchecked:
        if before.phase != "generate" or not FAULT.search(before.message):
            ills.append(f"vacuous: under the strict check unpatched {before.outcome}")
        elif not same(reference, ran["unpatched"], floor):
            ills.append("without the check unpatched generates something else")
    new = guards or after.message != before.message or FAULT.search(after.message)
    if after.phase and new:
        ills.append(f"patched {after.outcome}")
    elif not same(reference, ran.get("patched", after), floor):
        ills.append("patched generates something else")
    if after.races:
        ills.append(f"patched has races at {len(after.races)} places")
    return ills


def checked(ran: dict[str, Ran], tree: str) -> Ran:
    """A tree's run under the check, or the one without where the check is off."""
    labels = f"{tree} strict", f"{tree} raced", tree
    return next(ran[label] for label in labels if label in ran)


def floor_of(ran: dict[str, Ran]) -> float:
    """The largest difference between two generations of the references, in nats.

    Until their requests part, and where they do: tokens change places because their
    logprobs do.
    """
    generations = ran["reference"].outputs + ran["reference again"].outputs
    found = [compare(*pair) for pair in itertools.combinations(generations, 2)]
    return max(
        (max(each.logprobs, each.parting) for each in found),
        default=0.0,
    )


def tolerance_of(floor: float) -> float:
    """How far apart two tokens may be that change places, and two logprobs, in nats.

    Each token of a pair can change by the floor, one up and one down.
    """
    return max(TOLERANCE, 2 * floor) if floor else 0.0


def same(reference: Ran, run: Ran, floor: float) -> bool:
    """Whether a run generates what the reference does, as far as can be told."""
    tolerance = tolerance_of(floor)
    found = [
        compare(reference.outputs[0], outputs, tolerance) for outputs in run.outputs
    ]
    return not run.phase and all(
        each.parted is None and each.logprobs <= tolerance for each in found
    )


def rows(ran: dict[str, Ran]) -> list[tuple[str, ...]]:
    """The name of each run, and COLUMNS."""
    reference = ran["reference"]
    tolerance = tolerance_of(floor_of(ran))
    made = []
    for label, run in ran.items():
        tokens = logprobs = own = ""
        if len(run.outputs) > 1:
            pairs = [compare(*pair) for pair in itertools.combinations(run.outputs, 2)]
            own = f"{max(each.logprobs for each in pairs):.1e}"
            own += "" if all(each.tokens == "equal" for each in pairs) else " !"
        if run.outputs and reference.outputs and run is not reference:
            found = compare(reference.outputs[0], run.outputs[0], tolerance)
            tokens, logprobs = found.tokens, f"{found.logprobs:.1e}"
        seconds = "{:.0f} + {:.0f}".format(*run.seconds)
        made.append((label, tokens, logprobs, own, seconds, run.outcome))
    return made


def show(name: str, ran: dict[str, Ran], ills: list[str]) -> None:
    """Print the part of the table that is one scenario's, and what it died of."""
    print(f"{name}{'' if not ills else ': ' + '; '.join(ills)}")
    for label, *row in rows(ran):
        print(ROW.format(f"  {label}", *row))
        for where, count in (ran[label].races or {}).items():
            print(f"    race, {count} times: {where}")
    if not ran["reference"].phase and not ran["reference again"].phase:
        print(f"    floor: two equal runs differ by {floor_of(ran):.1e}")
    if SCENARIOS[name].unchecked and "patched" in ran:
        print(f"    check off: {SCENARIOS[name].unchecked}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("unpatched", type=lambda text: Path(text).resolve())
    parser.add_argument("patched", type=lambda text: Path(text).resolve())
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=[""])
    parser.add_argument("--race-check", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    unpatched, patched = arguments.unpatched, arguments.patched
    for tree in (unpatched, patched):
        if not (tree / "vllm/__init__.py").is_file():
            parser.error(f"{tree} holds no vllm/; give the folder that does")
    names = [n for n in SCENARIOS if any(part in n for part in arguments.scenarios)]
    if not names:
        parser.error(f"no such scenario; give part of one of {', '.join(SCENARIOS)}")
    lacking = arguments.race_check and not (patched / RACE_CHECK).exists()
    if (unpatched / RACE_CHECK).exists() or lacking:
        parser.error("give a released tree first, and then the same tree patched")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    print(ROW.format("scenario and run", *COLUMNS))
    failed, record = [], {}
    # One thread waits for each scenario; the processes are what is limited.
    with ThreadPoolExecutor(JOBS) as pool, ThreadPoolExecutor(len(names)) as waiting:
        scenarios = {
            name: waiting.submit(
                run_scenario, name, unpatched, patched, arguments.race_check, pool
            )
            for name in names
        }
        for name, future in scenarios.items():
            ran = future.result()
            ills = verdict(SCENARIOS[name], ran, differ(unpatched, patched, name))
            show(name, ran, ills)
            failed += [(name, ill, ran) for ill in ills]
            record[name] = {
                "floor": floor_of(ran),
                "runs": {
                    label: dict(zip(COLUMNS, row, strict=True))
                    | {"races": ran[label].races}
                    for label, *row in rows(ran)
                },
            }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))
    print(f"\n{len(names)} scenarios; {len(failed)} complaints")
    for name, ill, ran in failed:
        print(f"{name}: {ill}")
        for label, run in ran.items():
            if run.phase:
                print(f"--- {label}\n{run.log}")
    return int(bool(failed))


def differ(unpatched: Path, patched: Path, name: str) -> bool:
    """Whether the trees differ in the file whose fault ends the scenario."""
    fatal = SCENARIOS[name].fatal
    if fatal is None:
        return False
    one, other = unpatched / fatal, patched / fatal
    return one.exists() and one.read_bytes() != other.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
