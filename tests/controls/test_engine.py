# SPDX-License-Identifier: Apache-2.0
"""The engine script, with a stand-in for vLLM, and its own judgement."""

import dataclasses
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "engine/run.py"
run = SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="run"))
engine, eplb = sys.modules["engine"], sys.modules["eplb"]
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


@pytest.mark.parametrize(
    ("one", "other", "parting"),
    [
        (request(1, 2), request(1, 2, shift=0.5), 0.0),
        (request(7, second=8, gap=0.05), request(8, second=7, gap=0.02), 0.05),
        (request(7, second=8, gap=0.05), request(8, second=7, gap=0.4), 0.4),
        (request(7, second=8), request(9, second=7), float("inf")),
    ],
)
def test_change_where_two_requests_part(
    one: dict[str, Any], other: dict[str, Any], parting: float
) -> None:
    for left, right in ((one, other), (other, one)):
        assert run.compare([left], [right]).parting == pytest.approx(parting)


def test_what_is_no_tie_at_first_is_one_within_the_tolerance() -> None:
    one = [request(7, second=8, gap=0.3)]
    other = [request(8, second=7, gap=0.2)]
    assert run.compare(one, other).tokens == "request 0 differs at 0"
    assert run.compare(one, other, 0.29).tokens == "request 0 differs at 0"
    assert run.compare(one, other, 0.31).tokens == "equal, 1 ties"


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
        # A pageable copy is never vLLM's own business.
        (
            BUSY,
            {"unpatched strict": DIED, "patched strict": DIED, "unpatched": GOOD, "patched": GOOD},
            [f"patched dies: {PINNED}"],
        ),
        # Equal runs have the same bits here.
        (
            BUSY,
            {"unpatched strict": GOOD, "patched strict": generated(request(1, 2, 3, shift=1e-3))},
            ["patched generates something else"],
        ),
        (
            BUSY,
            {"unpatched strict": GOOD, "patched strict": generated(request(1, 2, 3, shift=math.nan))},
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
    ran = {"reference": GOOD, "reference again": GOOD} | ran
    assert run.verdict(scenario, ran, guards) == ills


def test_references_that_are_not_numbers_tell_nothing() -> None:
    nothing = generated(request(1, 2, 3, shift=math.nan))
    ran = {"reference": nothing, "reference again": nothing}
    ran |= {"unpatched strict": nothing, "patched strict": nothing}
    assert run.verdict(BUSY, ran, False) == ["vacuous: two equal runs differ by inf"]


def test_a_release_without_the_fatal_file(trees: tuple[Path, Path]) -> None:
    for tree in trees:
        (tree / run.SCENARIOS["sparse-mla"].fatal).unlink()
    assert not run.differ(*trees, "sparse-mla")


def test_what_starts_nowhere_is_no_complaint() -> None:
    ran = {"reference": NO_START, "reference again": NO_START}
    ran |= {"unpatched strict": NO_START}
    assert run.verdict(SPARSE, ran | {"patched strict": NO_START}, True) == []
    said = run.verdict(SPARSE, ran | {"patched strict": GOOD}, True)
    assert said == ["the reference cannot start: no kernels"]


def test_a_reference_that_ends_the_second_time() -> None:
    ran = {"reference": GOOD, "reference again": DIED_ELSE, "unpatched strict": GOOD}
    said = run.verdict(BUSY, ran | {"patched strict": GOOD}, False)
    assert said == ["the reference again dies: out of memory"]


def judged(one: Any, again: Any, patched: Any) -> list[str]:
    """What is said of a patched run, by two references."""
    ran = {"reference": one, "reference again": again, "unpatched strict": one}
    return run.verdict(BUSY, ran | {"patched strict": patched}, False)


def shifted(shift: float) -> Any:
    return generated(request(1, 2, 3, shift=shift))


def test_logprobs_as_close_as_two_equal_runs() -> None:
    wrong = ["patched generates something else"]
    assert judged(GOOD, GOOD, shifted(1e-3)) == wrong
    assert judged(GOOD, shifted(0.01), shifted(0.09)) == []
    assert judged(GOOD, shifted(0.01), shifted(0.11)) == wrong
    assert judged(GOOD, shifted(0.2), shifted(0.3)) == []
    assert judged(GOOD, shifted(0.2), shifted(0.41)) == wrong
    # Noise within one process counts as well, but not that of patched.
    noisy = run.Ran(outputs=[[request(1, 2, 3)], [request(1, 2, 3, shift=0.2)]])
    assert judged(noisy, GOOD, shifted(0.3)) == []
    assert judged(GOOD, noisy, shifted(0.3)) == []
    assert judged(GOOD, GOOD, noisy) == wrong
    assert run.floor_of({"reference": noisy, "reference again": shifted(-0.1)}) == (
        pytest.approx(0.3)
    )


def test_tokens_that_change_places_in_two_equal_runs() -> None:
    def near(*tokens: int, gap: float) -> Any:
        return generated(request(tokens[0], second=tokens[1], gap=gap))

    wrong = ["patched generates something else"]
    one, turned = near(7, 8, gap=0.2), near(8, 7, gap=0.2)
    assert judged(one, one, turned) == wrong
    assert judged(one, turned, turned) == []
    assert judged(one, turned, near(8, 7, gap=0.39)) == []
    assert judged(one, turned, near(8, 7, gap=0.41)) == wrong
    assert judged(one, turned, near(9, 7, gap=0.1)) == wrong


def test_equal_runs_that_differ_too_much_prove_nothing() -> None:
    said = judged(GOOD, shifted(1.2), GOOD)
    assert said == ["vacuous: two equal runs differ by 1.2"]
    assert judged(GOOD, shifted(0.9), GOOD) == []
    assert judged(GOOD, WRONG, GOOD) == ["vacuous: two equal runs differ by inf"]


def test_one_generation_a_run() -> None:
    once = run.Ran(outputs=[[request(1, 2, 3)]], runner="V2", moved=[4, 0, 2])
    assert judged(once, once, once) == []
    assert judged(once, once, run.Ran(outputs=[[request(1, 5, 3)]])) == [
        "patched generates something else"
    ]
    again = dataclasses.replace(once)
    rows = run.rows({"reference": once, "reference again": again})
    said = "generates (V2), 6 experts moved in 3 rebalances"
    assert rows[1][1:4] == ("equal", "0.0e+00", "") and rows[1][-1] == said


def test_a_scenario_without_the_check(
    trees: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = dataclasses.replace(SPARSE, unchecked="Gloo synchronizes")
    monkeypatch.setitem(run.SCENARIOS, "sparse-mla", scenario)
    with ThreadPoolExecutor(4) as pool:
        ran = run.run_scenario("sparse-mla", *trees, False, pool)
    assert list(ran) == ["reference", "reference again", "unpatched", "patched"]
    assert run.verdict(scenario, ran, True) == []
    said = run.verdict(scenario, ran | {"patched": DIED_ELSE}, True)
    assert said == ["patched dies: out of memory"]
    run.show("sparse-mla", ran, [])
    assert "    check off: Gloo synchronizes\n" in capsys.readouterr().out


# What engine.py asks of torch and vLLM. A scenario's own doings are in LLM.
STANDIN = {
    "torch/__init__.py": """
from types import SimpleNamespace
from . import distributed
uint8 = "uint8"
class nn:
    Module = object
cuda = SimpleNamespace(_sleep=lambda cycles: None)
def no_grad():
    return lambda function: function
class Generator:
    def __init__(self, device):
        assert device == "gpu"
    def manual_seed(self, seed):
        self.seed = seed
        return self
""",
    # Ranks that meet in files.
    "torch/distributed.py": """
import pickle
import time
from pathlib import Path

def init_process_group(backend, init_method, rank, world_size):
    global store, RANK, COUNT, calls
    assert backend == "gloo" and init_method.startswith("file:///")
    store, RANK, COUNT, calls = init_method[7:], rank, world_size, 0

def get_rank():
    return RANK

def get_world_size():
    return COUNT

def all_gather_object(found, mine, group):
    global calls
    calls += 1
    Path(f"{store}.{calls}.{RANK}.new").write_bytes(pickle.dumps(mine))
    Path(f"{store}.{calls}.{RANK}.new").rename(f"{store}.{calls}.{RANK}")
    until = time.monotonic() + 5
    for rank in range(COUNT):
        file = Path(f"{store}.{calls}.{rank}")
        while not file.exists():
            if time.monotonic() > until:
                raise RuntimeError("connection closed by peer")
            time.sleep(0.01)
        found[rank] = pickle.loads(file.read_bytes())

def barrier():
    all_gather_object([None] * COUNT, None, None)
""",
    "vllm/platforms.py": """
from types import SimpleNamespace
current_platform = SimpleNamespace(dist_backend="nccl")
""",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/parallel_state.py": """
import os
from types import SimpleNamespace
def get_eplb_group():
    rank = int(os.environ["RANK"])
    assert os.environ["LOCAL_RANK"] == "0"
    return SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group="cpu")
""",
    "vllm/distributed/eplb/__init__.py": "",
    # Three experts and a second slot for the first, on two ranks.
    "vllm/distributed/eplb/eplb_state.py": """
from types import SimpleNamespace

class Placement(list):
    def tolist(self):
        return [*map(list, self)] if isinstance(self[0], list) else list(self)

class EplbState:
    def __init__(self):
        self.model_states = {}

    def add_model(self, model):
        places = Placement(Placement([0, 1, 2, 0]) for _ in model.expert_weights)
        state = SimpleNamespace(model=model, physical_to_logical_map=places)
        self.model_states["hash"] = state

def _commit_eplb_maps(model_state, new_physical_to_logical_map):
    model_state.physical_to_logical_map = new_physical_to_logical_map

def _commit_eplb_maps_for_layer(model_state, new_physical_to_logical_map, layer):
    model_state.physical_to_logical_map[layer] = new_physical_to_logical_map
""",
    "vllm/utils/gpu_sync_debug.py": """
import contextlib
gpu_sync_allowed = contextlib.nullcontext
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/layers/__init__.py": "",
    "vllm/model_executor/layers/linear.py": """
class ColumnParallelLinear:
    def __init__(self, weight):
        self.weight = weight
    def named_parameters(self, recurse):
        assert not recurse
        return [("weight", self.weight)]
class RowParallelLinear(ColumnParallelLinear):
    pass
""",
    "vllm/model_executor/layers/vocab_parallel_embedding.py": """
class VocabParallelEmbedding:
    pass
""",
    "vllm/model_executor/model_loader/__init__.py": """
loaders = {}
def register_model_loader(name):
    return lambda loader: loaders.setdefault(name, loader)
""",
    "vllm/model_executor/model_loader/base_loader.py": "BaseModelLoader = object",
    "vllm/v1/worker/gpu_worker.py": """
class Worker:
    def execute_model(self):
        return 1
""",
    "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py": "PINNED = False",
    "vllm/utils/__init__.py": "",
    # A model of two layers, and what EPLB does to it.
    "vllm/eplb_model.py": """
import os
import time

from torch import distributed
from vllm.distributed.eplb import eplb_state
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.model_loader import loaders

FAULT = os.environ.get("FAULT", "")

class Slot:
    ndim, device, shape = 2, "gpu", (4, 4)
    def is_floating_point(self):
        return True
    def normal_(self, mean, scale, generator):
        seed = 0 if FAULT == "one seed" else generator.seed
        self.bytes, self.scale = seed.to_bytes(4, "big") * 2, scale
    def tobytes(self):
        return self.bytes

class Weight(list):
    ndim = 3
    def __init__(self):
        super().__init__([Slot(), Slot()])
        self.data = self
    def same(self, *arguments):
        return self
    detach = cpu = view = numpy = same
    def element_size(self):
        return 2

class Model:
    num_logical_experts = 4 if FAULT == "no copies" else 3
    def __init__(self):
        self.expert_weights = [[Weight(), Weight()], [Weight(), Weight()]]
        self.split, self.whole = Slot(), Slot()
    def named_modules(self):
        return [("o_proj", RowParallelLinear(self.split)), ("gate", object())]
    def named_parameters(self):
        yield "o_proj.weight", self.split
        yield "gate.weight", self.whole
        for layer, weights in enumerate(self.expert_weights):
            for name, weight in zip(("w13", "w2"), weights):
                yield f"layers.{layer}.experts.{name}", weight

class Engine:
    def __init__(self, config):
        self.config, self.rank = config, distributed.get_rank()
        self.model = model = Model()
        loaders["seeded"]().load_weights(model, None)
        # The root of four columns; in the background less, for rounding's sake.
        assert model.whole.scale == (0.5 if config["use_async"] else 1.0)
        found = [None, None]
        distributed.all_gather_object(found, (model.split.bytes, model.whole.bytes), "")
        assert found[0][0] != found[1][0] and found[0][1] == found[1][1]
        eplb = eplb_state.EplbState()
        eplb.add_model(model)
        (self.state,) = eplb.model_states.values()
        shared = [None, None]
        distributed.all_gather_object(shared, self.held(), "")
        self.experts = [rows[0] + rows[1] for rows in zip(*shared)]
        self.rebalance()

    def held(self):
        return [
            [[weight[slot].bytes for weight in layer] for slot in range(2)]
            for layer in self.model.expert_weights
        ]

    def rebalance(self):
        Placement = eplb_state.Placement
        places = self.state.physical_to_logical_map
        new = Placement(Placement([*row[1:], row[0]]) for row in places)
        if FAULT == "nothing moves":
            new = Placement(Placement(row) for row in places)
        for layer, row in enumerate(new):
            for slot, expert in enumerate(row[2 * self.rank :][:2]):
                for index, weight in enumerate(self.model.expert_weights[layer]):
                    weight[slot].bytes = self.experts[layer][expert][index]
            if self.config["use_async"]:
                self.spoil(layer)
                eplb_state._commit_eplb_maps_for_layer(
                    self.state, new_physical_to_logical_map=row, layer=layer)
        if not self.config["use_async"]:
            self.spoil(1)
            eplb_state._commit_eplb_maps(self.state, new_physical_to_logical_map=new)

    def spoil(self, layer):
        if FAULT == "weight" and self.rank == 1 and layer == 1 and self.generates:
            slot = self.model.expert_weights[1][0][1]
            slot.bytes = slot.bytes[:2] + bytes(2) + slot.bytes[4:]

    generates = False
    def generate(self):
        self.generates = True
        if FAULT == "hang":
            time.sleep(1000)
        if FAULT == "abort" and self.rank == 1:
            os.abort()
        for _ in range(2 if FAULT == "few" else 4):
            self.rebalance()
""",
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
        self.eplb = None
        if options.get("enable_eplb"):
            from vllm.eplb_model import Engine
            from vllm.platforms import current_platform
            assert current_platform.dist_backend == "gloo"
            assert options["distributed_executor_backend"] == "external_launcher"
            assert os.environ["VLLM_DISABLE_PYNCCL"] == "1"
            self.attention = ""
            self.eplb = Engine(options["eplb_config"])
        if self.attention == "TRITON_MLA":
            raise ImportError("no flash-attn\\nin this payload")
        if self.attention == "TRITON_ATTN" and "DIES" not in os.environ:
            os.abort()
        self.llm_engine = Of(vllm_config=Of(use_v2_model_runner=True))

    def generate(self, prompts, params, use_tqdm):
        if self.eplb:
            self.eplb.generate()
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
    assert "dies: a non_blocking H2D copy: the CPU tensor is not pinned" in fatal[2]
    assert [line[:19].strip() for line in fatal[:-1]] == [
        "reference",
        "reference again",
        "unpatched strict",
        "patched strict",
        "unpatched",
    ]
    assert [line.endswith("  generates (V2)") for line in fatal[:-1]] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert all("equal" in line for line in fatal[3:-1] + busy[1:-1])
    assert len(busy) == 5
    assert fatal[-1] == busy[-1] == "    floor: two equal runs differ by 0.0e+00"
    record = json.loads(kept.read_text())["sparse-mla-graphs"]
    assert record["floor"] == 0.0
    record = record["runs"]
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
    assert "request 0 differs at 1" in lines[3]


def test_what_cannot_start_is_listed(trees: tuple[Path, Path]) -> None:
    done = script(*trees, "mla-dense", "moe-triton-v1")
    assert done.returncode == 0, done.stdout + done.stderr
    table = outcomes(done.stdout)
    assert len(table["mla-dense"]) == len(table["moe-triton-v1"]) == 4
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_engines_too(
    trees: tuple[Path, Path], tmp_path: Path, number: int
) -> None:
    for tree in trees:
        (tree / "vllm/__init__.py").write_text(
            "import os, time\n"
            f"open(f'{tmp_path}/{{os.getpid()}}.pid', 'w').close()\n"
            "time.sleep(1000)\n"
        )
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, trees), "moe-triton-v1"]
    )
    until = time.monotonic() + 60
    while not (started := list(tmp_path.glob("*.pid"))):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    for file in started:
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < until:
                os.kill(int(file.stem), 0)
                time.sleep(0.1)


def run_eplb(trees: tuple[Path, Path], fault: str = "", name: str = "moe-eplb") -> Any:
    return run.run_engine(name, trees[0], trees[1] / run.RACE_CHECK, {"FAULT": fault})


def test_two_ranks_of_eplb(trees: tuple[Path, Path]) -> None:
    done = script(*trees, "moe-eplb")
    assert done.returncode == 0, done.stdout + done.stderr
    table = outcomes(done.stdout)
    moved = "  generates (V2), {} experts moved in {} rebalances"
    for name, generations in (("moe-eplb", 1), ("moe-eplb-async", 2)):
        *lines, floor = table[name]
        assert len(lines) == 4 and floor.endswith("0.0e+00")
        count = 4 * generations
        assert all(f"moved in {count} rebalances" in line for line in lines), lines
    assert moved.format(12, 4) in table["moe-eplb"][0]


@pytest.mark.parametrize("name", ["moe-eplb", "moe-eplb-async"])
def test_a_wrong_expert_ends_the_engine(trees: tuple[Path, Path], name: str) -> None:
    """On rank 1; rank 0 loses its peer and says something else, later."""
    ran = run_eplb(trees, "weight", name)
    where = "rank 1, MoE layer 1, slot 1: weight 0 of logical expert "
    assert ran.outcome.startswith(f"dies: {where}"), ran.log
    assert "is wrong after rebalance 1, first at element 1: bytes 0000" in ran.outcome
    assert not ran.outputs


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("abort", "dies: rank 1 ended with -6"),
        ("few", "dies: of 2 rebalances 2 moved an expert to another rank; 3 have to"),
        ("nothing moves", "dies: of 4 rebalances 0 moved an expert to another rank; 3 have to"),
        ("one seed", "cannot start: two experts of layer 0 are the same"),
        ("no copies", "cannot start: the slots of expert 0 of layer 0 differ"),
    ],
)  # fmt: skip
def test_faults_of_eplb(trees: tuple[Path, Path], fault: str, outcome: str) -> None:
    if fault == "one seed":
        split = trees[0] / "vllm/eplb_model.py"
        split.write_text(STANDIN["vllm/eplb_model.py"].replace("assert found", "found"))
    assert run_eplb(trees, fault).outcome == outcome


def test_ranks_do_not_outlive_the_script(
    trees: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run.run_engine.__globals__, "TIMEOUT", 4)
    monkeypatch.setenv("PIDS", str(tmp_path / "pid"))
    with (trees[0] / "vllm/__init__.py").open("a") as file:
        file.write("\nopen(os.environ['PIDS'] + str(os.getpid()), 'w')\n")
    assert run_eplb(trees, "hang").outcome == "dies: no end in 4 s"
    pids = [int(file.name[3:]) for file in tmp_path.glob("pid*")]
    assert len(pids) == 2
    until = time.monotonic() + 5
    while any(map(alive, pids)):
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize(
    ("results", "codes", "outcome"),
    [
        ([{"outputs": [1]}, {"outputs": [2]}], [0, 0], {"outputs": [1]}),
        (
            [
                {"error": {"message": "closed", "at": 2.0}},
                {"error": {"message": "wrong", "at": 1.0}},
            ],
            [0, 0],
            {"error": {"message": "wrong", "at": 1.0}},
        ),
        (
            [{"outputs": [1], "runner": "V2"}, {"error": {"message": "wrong", "at": 1.0}}],
            [0, 0],
            {"runner": "V2", "error": {"message": "wrong", "at": 1.0}},
        ),
        # Killed for the other's sake.
        (
            [{"runner": "V2"}, {"error": {"message": "wrong", "at": 1.0}}],
            [None, 0],
            {"runner": "V2", "error": {"message": "wrong", "at": 1.0}},
        ),
        (
            [{"error": {"message": "closed", "at": 2.0}}, {}],
            [0, -11],
            {"error": {"phase": "start", "message": "rank 1 ended with -11", "at": 0.0}},
        ),
        (
            [{"outputs": [1], "races": {"a": 1, "b": 2}}, {"outputs": [1], "races": {"a": 4}}],
            [0, 0],
            {"outputs": [1], "races": {"a": 5, "b": 2}},
        ),
    ],
)  # fmt: skip
def test_what_ranks_come_to(
    results: list[dict[str, Any]], codes: list[int | None], outcome: dict[str, Any]
) -> None:
    assert eplb.combine(results, codes) == outcome


def test_experts_that_arrive_on_a_rank() -> None:
    assert eplb.arrivals([0, 1, 2, 0], [1, 0, 0, 2], 2) == 0  # within a rank
    assert eplb.arrivals([0, 1, 2, 0], [0, 2, 2, 0], 2) == 1
    assert eplb.arrivals([0, 1, 2, 0], [2, 2, 1, 1], 2) == 4
    assert eplb.arrivals([0, 1, 2, 0], [2, 2, 1, 1], 1) == 0


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
        (lambda trees: trees[::-1], "give a released tree first"),
        (lambda trees: (trees[1], trees[1]), "give a released tree first"),
        (lambda trees: (trees[0], trees[0], "--race-check"), "the same tree patched"),
    ],
)
def test_bad_input(trees: tuple[Path, Path], change: Any, said: str) -> None:
    done = script(*change(trees))
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout


def test_prompts_and_options_are_the_same_in_every_process(tmp_path: Path) -> None:
    for scenario in engine.SCENARIOS.values():
        made = engine.prompts(scenario)
        assert made == engine.prompts(scenario)
        assert [len(prompt) for prompt in made] == [n for n, _ in scenario.requests]
        longest = max(sum(lengths) for lengths in scenario.requests)
        assert longest <= scenario.options["max_model_len"]
        assert len(scenario.requests) <= 32  # max_num_seqs: all run in one batch
        assert scenario.options.get("tensor_parallel_size", 1) == scenario.ranks
    drafted = engine.SCENARIOS["dense-flashinfer-draft"]
    made = engine.options(drafted, tmp_path)
    assert json.loads(Path(made["model"], "config.json").read_text()) == drafted.model
    draft = Path(made["speculative_config"]["model"], "config.json")
    assert json.loads(draft.read_text()) == drafted.draft
