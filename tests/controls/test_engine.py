# SPDX-License-Identifier: Apache-2.0
"""The engine script, with a stand-in for vLLM, and its own judgement."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "engine/run.py"
run = SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="run"))
SPARSE, BUSY = run.SCENARIOS["sparse-mla"], run.SCENARIOS["dense-flashinfer"]

PINNED = "Tensor.copy_: a non_blocking H2D copy ... (the CPU tensor is not pinned)"


def request(
    *tokens: int, second: int = 99, gap: float = 1.0, shift: float = 0.0
) -> dict[str, Any]:
    """A request with `second` as its runner-up, `gap` nats behind, at each position."""
    scores = [{str(t): shift - 1.0, str(second): shift - 1.0 - gap} for t in tokens]
    return {"tokens": list(tokens), "logprobs": scores}


def generated(*requests: dict[str, Any], **more: Any) -> Any:
    return run.Ran(outputs=[list(requests)] * 2, runner="V2", **more)


GOOD = generated(request(1, 2, 3))
WRONG = generated(request(1, 5, 3))
DIED = run.Ran("generate", PINNED)
DIED_ELSE = run.Ran("generate", "out of memory")
NO_START = run.Ran("start", "no kernels")


@pytest.mark.parametrize(
    ("one", "other", "tokens", "logprobs"),
    [
        (request(1, 2), request(1, 2), "equal", 0.0),
        (request(1, 2), request(1, 2, shift=0.5), "equal", 0.5),
        (request(1, 2), request(1, 3), "request 0 differs at 1", 0.0),
        (request(1, 2), request(1), "request 0 differs at 1", 0.0),
        # The same two tokens are best in both, and close.
        (request(7, second=8, gap=0.05), request(8, second=7, gap=0.05), "equal, 1 ties", 0.0),
        # Close in one run alone.
        (request(7, second=8, gap=0.05), request(8, second=7), "request 0 differs at 0", 0.0),
        # What follows a tie is not compared.
        (
            {
                "tokens": [7, 1],
                "logprobs": [{"7": -1.0, "8": -1.01}, {"1": -1.0}],
            },
            {
                "tokens": [8, 2],
                "logprobs": [{"7": -1.0, "8": -1.01}, {"2": -9.0}],
            },
            "equal, 1 ties",
            0.0,
        ),
    ],
)  # fmt: skip
def test_comparisons(
    one: dict[str, Any], other: dict[str, Any], tokens: str, logprobs: float
) -> None:
    for left, right in ((one, other), (other, one)):
        found = run.compare([left], [right])
        assert found.tokens == tokens
        assert found.logprobs == pytest.approx(logprobs)


def test_the_first_request_that_differs_is_named() -> None:
    one = [request(1), request(2), request(3)]
    other = [request(1), request(5), request(6)]
    assert run.compare(one, other).parted == (1, 0)


@pytest.mark.parametrize(
    ("scenario", "ran", "ills"),
    [
        (SPARSE, {"unpatched strict": DIED, "patched strict": GOOD, "unpatched": GOOD}, []),
        (
            SPARSE,
            {"unpatched strict": GOOD, "patched strict": GOOD},
            ["vacuous: under the strict check unpatched generates (V2)"],
        ),
        (
            SPARSE,
            {"unpatched strict": DIED_ELSE, "patched strict": GOOD, "unpatched": GOOD},
            ["vacuous: under the strict check unpatched dies: out of memory"],
        ),
        (
            SPARSE,
            {"unpatched strict": DIED, "patched strict": GOOD, "unpatched": WRONG},
            ["without the check unpatched generates something else"],
        ),
        (
            SPARSE,
            {"unpatched strict": DIED, "patched strict": DIED, "unpatched": GOOD, "patched": GOOD},
            [f"patched dies: {PINNED}"],
        ),
        (
            SPARSE,
            {"unpatched strict": DIED, "patched strict": WRONG, "unpatched": GOOD},
            ["patched generates something else"],
        ),
        (
            SPARSE,
            {"unpatched strict": DIED, "patched strict": NO_START, "unpatched": GOOD},
            ["patched cannot start: no kernels"],
        ),
        # Unpatched may be wrong where the GPU is busy.
        (BUSY, {"unpatched strict": WRONG, "patched strict": GOOD}, []),
        (
            BUSY,
            {"unpatched strict": GOOD, "patched strict": WRONG},
            ["patched generates something else"],
        ),
        # A sync of vLLM's own, which no edit is for.
        (
            BUSY,
            {"unpatched strict": DIED_ELSE, "patched strict": DIED_ELSE, "unpatched": GOOD, "patched": GOOD},
            [],
        ),
        (
            BUSY,
            {"unpatched strict": DIED_ELSE, "patched strict": DIED_ELSE, "unpatched": GOOD, "patched": WRONG},
            ["patched generates something else"],
        ),
        (
            BUSY,
            {"unpatched strict": GOOD, "patched strict": DIED_ELSE, "patched": GOOD},
            ["patched dies: out of memory"],
        ),
        (
            BUSY,
            {
                "unpatched raced": generated(request(1, 2, 3), races={"a.py:1": 9}),
                "patched raced": generated(request(1, 2, 3), races={}),
            },
            [],
        ),
        (
            BUSY,
            {
                "unpatched raced": generated(request(1, 2, 3), races={}),
                "patched raced": generated(request(1, 2, 3), races={"a.py:1": 9}),
            },
            ["patched has races at 1 places"],
        ),
    ],
)  # fmt: skip
def test_verdicts(scenario: Any, ran: dict[str, Any], ills: list[str]) -> None:
    guards = scenario.fatal is not None
    assert run.verdict(scenario, {"reference": GOOD} | ran, guards) == ills


def test_what_starts_nowhere_is_no_complaint() -> None:
    ran = {"reference": NO_START, "unpatched strict": NO_START}
    assert run.verdict(SPARSE, ran | {"patched strict": NO_START}, True) == []
    said = run.verdict(SPARSE, ran | {"patched strict": GOOD}, True)
    assert said == ["the reference cannot start: no kernels"]


def test_logprobs_as_close_as_two_runs_of_the_reference() -> None:
    far = generated(request(1, 2, 3, shift=0.3))
    noisy = run.Ran(outputs=[[request(1, 2, 3)], [request(1, 2, 3, shift=0.2)]])
    assert run.same(noisy, far)
    assert not run.same(GOOD, far)
    assert not run.same(GOOD, noisy)  # its own noise does not excuse it


# What engine.py asks of torch and vLLM. A scenario's own doings are in LLM.
STANDIN = {
    "torch/__init__.py": """
from types import SimpleNamespace
class nn:
    Module = object
cuda = SimpleNamespace(_sleep=lambda cycles: None)
def no_grad():
    return lambda function: function
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": """
def register_model_loader(name):
    assert name == "seeded"
    return lambda loader: loader
""",
    "vllm/model_executor/model_loader/base_loader.py": "BaseModelLoader = object",
    "vllm/v1/worker/gpu_worker.py": """
class Worker:
    def execute_model(self):
        return 1
""",
    "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py": "PINNED = False",
    "vllm/utils/__init__.py": "",
    "vllm/__init__.py": """
import os
import sys
from types import SimpleNamespace as Of

class SamplingParams:
    def __init__(self, max_tokens, logprobs, **options):
        assert options["temperature"] == 0.0 and options["ignore_eos"]
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, **options):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self.attention = options["attention_config"]["backend"]
        if self.attention == "TRITON_MLA":
            raise ImportError("no flash-attn\\nin this payload")
        if self.attention == "TRITON_ATTN" and "DIES" not in os.environ:
            os.abort()
        self.llm_engine = Of(vllm_config=Of(use_v2_model_runner=True))

    def generate(self, prompts, params, use_tqdm):
        if self.attention == "TRITON_ATTN" and "moe" in os.environ.get("DIES", ""):
            os.abort()
        from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90 as sm90
        strict = os.environ.get("VLLM_GPU_SYNC_CHECK") == "error"
        if self.attention.endswith("SM90") and strict and not sm90.PINNED:
            raise RuntimeError("a non_blocking H2D copy: the CPU tensor is not pinned")
        def score(prompt, n):
            return {(sum(prompt["prompt_token_ids"]) + n) % 99: Of(logprob=-0.5), 100: Of(logprob=-3)}
        return [
            Of(outputs=[Of(
                token_ids=[next(iter(score(prompt, n))) for n in range(each.max_tokens)],
                logprobs=[score(prompt, n) for n in range(each.max_tokens)])])
            for prompt, each in zip(prompts, params, strict=True)
        ]
""",
}
RACE_CHECK = """
import functools
from collections import Counter

@functools.cache
def install_h2d_race_check():
    return Check()

class Check:
    counts = Counter(compared=3)
    seen = {(("/x/python/runner.py", 1, "f"), ("/x/vllm/a/b.py", 7, "g")): 12}
    def check(self):
        return []
"""


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """Unpatched and patched, of the stand-in."""
    made = tmp_path / "unpatched", tmp_path / "patched"
    for tree in made:
        for name, text in STANDIN.items():
            file = tree / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    (made[1] / run.SCENARIOS["sparse-mla"].fatal).write_text("PINNED = True")
    (made[1] / run.RACE_CHECK).write_text(RACE_CHECK)
    return made


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def outcomes(said: str) -> dict[str, list[str]]:
    """The lines of each scenario."""
    made: dict[str, list[str]] = {}
    for line in said.split("\n\n", maxsplit=1)[0].splitlines()[1:]:
        if line.startswith(" "):
            made[list(made)[-1]].append(line)
        else:
            made[line] = []
    return made


def test_table_of_sound_trees(trees: tuple[Path, Path], tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    done = script(*trees, "sparse-mla-g", "dense-flashinfer-v1", "--json", kept)
    assert done.returncode == 0, done.stdout + done.stderr
    table = outcomes(done.stdout)
    fatal, busy = table["sparse-mla-graphs"], table["dense-flashinfer-v1"]
    assert "dies: a non_blocking H2D copy: the CPU tensor is not pinned" in fatal[1]
    assert [line.split()[0] for line in fatal] == [
        "reference",
        "unpatched",
        "patched",
        "unpatched",
    ]
    assert [line.endswith("  generates (V2)") for line in fatal] == [
        True,
        False,
        True,
        True,
    ]
    assert all("equal" in line for line in fatal[2:] + busy[1:])
    assert len(busy) == 3
    record = json.loads(kept.read_text())["sparse-mla-graphs"]
    assert record["patched strict"]["tokens"] == "equal"
    assert record["unpatched strict"]["outcome"].startswith("dies: ")


def test_patched_that_is_not_cured_fails(trees: tuple[Path, Path]) -> None:
    (trees[1] / run.SCENARIOS["sparse-mla"].fatal).write_text(
        "PINNED = False  # is not"
    )
    done = script(*trees, "sparse-mla-graphs")
    assert done.returncode == 1
    assert "sparse-mla-graphs: patched dies: a non_blocking H2D copy" in done.stdout
    assert "RuntimeError: a non_blocking H2D copy" in done.stdout  # the log's end


def test_patched_that_generates_something_else_fails(trees: tuple[Path, Path]) -> None:
    file = trees[1] / "vllm/__init__.py"
    file.unlink()
    file.write_text(STANDIN["vllm/__init__.py"].replace("+ n) % 99", "+ 2 * n) % 99"))
    done = script(*trees, "dense-flashinfer-v1")
    assert done.returncode == 1
    (lines,) = outcomes(done.stdout).values()
    assert "request 0 differs at 1" in lines[2]


def test_what_cannot_start_is_listed(trees: tuple[Path, Path]) -> None:
    done = script(*trees, "mla-dense", "moe-triton-v1")
    assert done.returncode == 0, done.stdout + done.stderr
    table = outcomes(done.stdout)
    assert len(table["mla-dense"]) == len(table["moe-triton-v1"]) == 3
    assert all("cannot start: no flash-attn" in line for line in table["mla-dense"])
    assert all("cannot start: ended with -6" in line for line in table["moe-triton-v1"])


def test_a_process_that_aborts_while_it_generates(
    trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIES", "moe")
    done = script(*trees, "moe-triton-v1")
    assert done.returncode == 1
    (lines,) = outcomes(done.stdout).values()
    assert all("dies: ended with -6" in line for line in lines)


def test_a_process_that_does_not_end_is_killed(
    trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run.run_engine.__globals__, "TIMEOUT", 2)
    (trees[0] / "vllm/__init__.py").write_text("import time\ntime.sleep(1000)")
    ran = run.run_engine("sparse-mla", trees[0], Path("none.py"), {})
    assert ran.outcome == "cannot start: no end in 2 s"


def test_switches_of_the_caller_are_not_inherited(
    trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_GPU_SYNC_CHECK", "error")
    done = script(*trees, "sparse-mla-graphs")
    assert done.returncode == 0, done.stdout


def test_races_are_listed(trees: tuple[Path, Path]) -> None:
    """Patched has them, too, and that is a complaint; it must install the check."""
    worker = trees[1] / "vllm/v1/worker/gpu_worker.py"
    done = script(*trees, "dense-flashinfer-v1", "--race-check")
    assert done.returncode == 1
    assert "dies: this vLLM did not install its race check" in done.stdout

    worker.write_text(
        "import vllm.utils.h2d_race_check\n" + STANDIN["vllm/v1/worker/gpu_worker.py"]
    )
    done = script(*trees, "dense-flashinfer-v1", "--race-check")
    assert done.returncode == 1
    (lines,) = outcomes(done.stdout).values()
    assert lines.count("    race, 12 times: /x/python/runner.py:1 > vllm/a/b.py:7") == 2
    assert "patched has races at 1 places" in done.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda trees: (trees[0] / "nowhere", trees[1]), "give the folder that does"),
        (lambda trees: (*trees, "no-such"), "give part of one of sparse-mla, "),
        (lambda trees: (*trees[::-1], "--race-check"), "give the patched tree second"),
    ],
)
def test_bad_input(trees: tuple[Path, Path], change: Any, said: str) -> None:
    done = script(*change(trees))
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout


def test_prompts_and_options_are_the_same_in_every_process(tmp_path: Path) -> None:
    engine = sys.modules["engine"]
    for scenario in engine.SCENARIOS.values():
        made = engine.prompts(scenario)
        assert made == engine.prompts(scenario)
        assert [len(prompt) for prompt in made] == [n for n, _ in scenario.requests]
        longest = max(sum(lengths) for lengths in scenario.requests)
        assert longest <= scenario.options["max_model_len"]
        assert len(scenario.requests) <= 32  # max_num_seqs: all run in one batch
    drafted = engine.SCENARIOS["dense-flashinfer-draft"]
    made = engine.options(drafted, tmp_path)
    assert json.loads(Path(made["model"], "config.json").read_text()) == drafted.model
    draft = Path(made["speculative_config"]["model"], "config.json")
    assert json.loads(draft.read_text()) == drafted.draft
