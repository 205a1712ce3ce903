# SPDX-License-Identifier: Apache-2.0
"""The numbers' script: tables, aims, plot, refusals, and the order of the engines.

Stand-ins for torch and vLLM take the place of what needs a GPU. They show that the
script judges and reports rightly, and nothing about speed.
"""

import copy
import itertools
import json
import os
import runpy
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = BENCHMARKS / "run.py"
report = SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "report.py")))


def exchange(ranks: int, mib: int, **changes: Any) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "mib": mib,
        "first_ms": 200.0,
        "steady_ms": 105.0,
        "transport_ms": 100.0,
        "copy_gbps": 49.0,
        "limit_gbps": 50.0,
        "copy_host_ms": 0.05,
        "copy_host_busy_ms": 0.05,
        "waited": False,
    } | changes


def build(kind: str, tokens: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "tokens": tokens,
        "rows": 256,
        "idle_ms": 10.0,
        "busy_ms": 10.5,
        "kernel_ms": 50.0,
        "waited": False,
    } | changes


def ran(form: str, speed: float = 1000.0, **changes: Any) -> dict[str, Any]:
    latency = {"median": 2.0, "p99": 3.0}
    return {"form": form, "tokens_per_s": speed, "itl_ms": latency} | changes


PAGEABLE = {"copy_gbps": 6.0, "copy_host_ms": 20.0, "copy_host_busy_ms": 70.0}
FORMS = ("unpatched", "patched, guard off", "patched")
NUMBERS: dict[str, Any] = {
    "vllm": "0.33.0",
    "flashinfer": "0.7.2",
    "torch": "2.11.0",
    "gpu": "NVIDIA H200",
    "cores": 16,
    "eplb": {
        "unpatched": {
            "rows": [
                exchange(ranks, mib, steady_ms=210.0, waited=mib > 1, **PAGEABLE)
                for ranks in (4, 2)
                for mib in (1, 64)
            ]
        },
        "patched": {
            "rows": [exchange(ranks, mib) for ranks in (4, 2) for mib in (1, 64)]
        },
    },
    "mla": {
        "unpatched": {
            "rows": [
                build("plan", 2048),
                build("plan", 65536, busy_ms=60.0, waited=True),
            ]
        },
        "patched": {"rows": [build("plan", 2048), build("plan", 65536)]},
    },
    "engine": {"dense-flashinfer": [ran(form) for _ in range(3) for form in FORMS]},
}


@pytest.fixture
def numbers() -> dict[str, Any]:
    return copy.deepcopy(NUMBERS)


def patched(numbers: dict[str, Any], part: str, row: int) -> dict[str, Any]:
    return numbers[part]["patched"]["rows"][row]


def unmet(numbers: dict[str, Any]) -> list[str]:
    return [f"{aim} ({worst})" for aim, met, worst in report.aims(numbers) if not met]


# ---- Tables and judgement.


def test_all_aims_met(numbers: dict[str, Any]) -> None:
    assert len(list(report.aims(numbers))) == 4
    assert unmet(numbers) == []
    assert report.slower(numbers) == []
    assert report.errors(numbers) == []
    assert "by more than 2%:\n- nothing" in report.text(numbers)


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        (
            "eplb",
            {"copy_gbps": 47.0},
            "EPLB's copy stage at 95% of the pinned copy limit (94%: 4 ranks, 64 MiB)",
        ),
        (
            "eplb",
            {"waited": True},
            "EPLB's copy stage does not wait for the GPU (4 ranks, 64 MiB)",
        ),
        (
            "eplb",
            {"steady_ms": 111.0},
            "EPLB's exchange at most 1.1 times Gloo alone (1.11: 4 ranks, 64 MiB)",
        ),
        (
            "mla",
            {"busy_ms": 11.1},
            "SM90 plan: busy within 1 ms of idle (+1.10 ms: 65536 tokens)",
        ),
    ],
)
def test_an_aim_that_is_not_met_says_where(
    numbers: dict[str, Any], part: str, change: dict[str, Any], said: str
) -> None:
    patched(numbers, part, 1).update(change)
    assert unmet(numbers) == [said]
    aim, worst = said.rsplit(" (", 1)
    assert f"- NOT MET: {aim} (worst {worst}" in report.text(numbers)


def test_unpatched_is_not_held_to_the_aims(numbers: dict[str, Any]) -> None:
    del numbers["eplb"]["patched"], numbers["mla"]["patched"]
    assert list(report.aims(numbers)) == []


def test_what_got_slower_is_listed_worst_first(numbers: dict[str, Any]) -> None:
    patched(numbers, "mla", 0)["idle_ms"] = 10.3
    patched(numbers, "mla", 1)["idle_ms"] = 10.1  # within 2%
    patched(numbers, "eplb", 3)["copy_gbps"] = 3.0
    for run in numbers["engine"]["dense-flashinfer"]:
        if run["form"] == "patched":
            run["tokens_per_s"] = 800.0
            run["itl_ms"] = {"median": 2.0, "p99": 3.3}
    assert [(each.name, round(each.factor, 3)) for each in report.slower(numbers)] == [
        ("eplb, ranks 2, mib 64, copy_gbps", 2.0),
        ("dense-flashinfer, patched, tokens/s", 1.25),
        ("dense-flashinfer, patched, ITL p99", 1.1),
        ("mla, kind plan, tokens 2048, idle_ms", 1.03),
    ]
    assert "- dense-flashinfer, patched, tokens/s: 1000 to 800 (+25.0%)" in report.text(
        numbers
    )


def test_what_the_machine_does_is_not_compared(numbers: dict[str, Any]) -> None:
    patched(numbers, "eplb", 0)["transport_ms"] = 104.0
    patched(numbers, "eplb", 0)["limit_gbps"] = 49.5
    patched(numbers, "mla", 0)["kernel_ms"] = 90.0
    assert report.slower(numbers) == []


def test_engines_count_by_the_median_of_their_runs(numbers: dict[str, Any]) -> None:
    runs = numbers["engine"]["dense-flashinfer"]
    for run, speed in zip(runs[2::3], (500.0, 1010.0, 990.0), strict=True):
        run["tokens_per_s"] = speed
    assert report.slower(numbers) == []
    (line,) = (
        line
        for line in report.engine_table(numbers).splitlines()
        if " patched |" in line
    )
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "dense-flashinfer",
        "patched",
        "990",
        "500 1010 990",
        "2.000",
        "3.000",
    ]


def cells(table: str) -> list[list[str]]:
    return [[c.strip() for c in row.strip("|").split("|")] for row in table.split("\n")]


def test_tables_stand_in_order_and_side_by_side(numbers: dict[str, Any]) -> None:
    _, _, *lines = cells(report.eplb_table(numbers))
    assert [line[:3] for line in lines] == [
        [ranks, mib, tree]
        for ranks in "24"
        for mib in ("1", "64")
        for tree in ("unpatched", "patched")
    ]
    assert lines[2][3:] == [
        "200.0",
        "210.0",
        "100.0",
        "2.10",
        "6.0",
        "50.0",
        "12%",
        "20.00",
        "70.00",
        "yes",
    ]
    assert lines[3][3:] == [
        "200.0",
        "105.0",
        "100.0",
        "1.05",
        "49.0",
        "50.0",
        "98%",
        "0.05",
        "0.05",
        "no",
    ]
    _, _, *lines = cells(report.mla_table(numbers))
    assert lines[2] == (
        ["SM90 plan", "65536", "256", "unpatched", "10.00", "60.00", "50.00", "yes"]
    )


def test_a_table_is_markdown(numbers: dict[str, Any]) -> None:
    lines = report.mla_table(numbers).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == set("| -:")


def test_errors_are_rows_and_the_rest_is_kept(numbers: dict[str, Any]) -> None:
    numbers["eplb"]["unpatched"] = {"error": "no end in 300 s: "}
    numbers["mla"]["patched"]["error"] = "ended with 1: no nvcc"
    numbers["engine"]["dense-flashinfer"][0] = {"form": "unpatched", "error": "died"}
    assert report.errors(numbers) == [
        "eplb, unpatched: no end in 300 s: ",
        "mla, patched: ended with 1: no nvcc",
        "dense-flashinfer, unpatched: died",
    ]
    said = report.text(numbers)
    assert said.endswith("- dense-flashinfer, unpatched: died")
    assert "1000 1000 |" in said  # its two other runs


def test_nothing_but_errors(numbers: dict[str, Any], tmp_path: Path) -> None:
    for part in ("eplb", "mla"):
        numbers[part] = {tree: {"error": "died"} for tree in ("unpatched", "patched")}
    numbers["engine"] = {"dense-flashinfer": [{"form": "patched", "error": "died"}]}
    assert report.text(numbers).count("died") == 5
    report.plot(numbers, tmp_path / "numbers.png")


# ---- The plot.


class Panel:
    """Records what is drawn; what matplotlib makes of it is another test's."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[list[float], list[float]]] = {}
        self.bars: list[tuple[float, float]] = []
        self.titles: list[str] = []

    def plot(self, x: Any, y: Any, *_: Any, label: str = "", **__: Any) -> None:
        self.lines[label] = list(x), list(y)

    def bar(self, place: float, height: float, **_: Any) -> None:
        self.bars.append((place, height))

    def set(self, **texts: str) -> None:
        self.titles.append(texts["title"])

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def test_panels_show_what_was_measured(numbers: dict[str, Any]) -> None:
    left, middle, right = Panel(), Panel(), Panel()
    report.plot_eplb(left, numbers)
    assert left.lines == {
        "unpatched, 2 ranks": ([1, 64], [6.0, 6.0]),
        "unpatched, 4 ranks": ([1, 64], [6.0, 6.0]),
        "patched, 2 ranks": ([1, 64], [49.0, 49.0]),
        "patched, 4 ranks": ([1, 64], [49.0, 49.0]),
        "pinned copy limit": ([1, 64], [50.0, 50.0]),
    }
    report.plot_mla(middle, numbers)
    assert middle.lines["unpatched, GPU busy"] == ([2048, 65536], [10.5, 60.0])
    assert middle.lines["patched, GPU busy"] == ([2048, 65536], [10.5, 10.5])
    assert middle.lines["patched, GPU idle"] == ([2048, 65536], [10.0, 10.0])
    numbers["engine"]["dense-flashinfer"][2]["tokens_per_s"] = 970.0
    numbers["engine"]["dense-flashinfer"][5]["tokens_per_s"] = 980.0
    report.plot_engines(right, numbers)
    assert right.bars == [(0, 100.0), (1, 100.0), (2, pytest.approx(98.0))]


def test_dense_builds_are_drawn_where_there_is_no_plan(numbers: dict[str, Any]) -> None:
    for result in numbers["mla"].values():
        for row in result["rows"]:
            row["kind"] = "dense"
    panel = Panel()
    report.plot_mla(panel, numbers)
    assert panel.titles == ["dense MLA, 4 builds: host time"]
    assert len(panel.lines) == 4


@pytest.mark.parametrize("left_out", [(), ("eplb",), ("mla", "engine")])
def test_plot_is_a_png(
    numbers: dict[str, Any], left_out: tuple[str, ...], tmp_path: Path
) -> None:
    for part in left_out:
        del numbers[part]
    file = tmp_path / "numbers.png"
    report.plot(numbers, file)
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width == (3 - len(left_out)) * height == (3 - len(left_out)) * 550


# ---- The script, with stand-ins.

TORCH = """
import os
from types import SimpleNamespace as Of
__version__ = "2.11.0"
class Tensor: pass
class Module: pass
nn = Of(Module=Module)
class cuda:
    Event = object
    is_available = staticmethod(lambda: "NO_GPU" not in os.environ)
    get_device_name = staticmethod(lambda: "a stand-in")
def no_grad():
    return lambda function: function
"""
STANDIN = {
    "vllm/_version.py": "__version__ = version = '0.33.0'\n__commit_id__ = 'g0'\n",
    "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": """
def register_model_loader(name):
    return lambda loader: loader
""",
    "vllm/model_executor/model_loader/base_loader.py": "BaseModelLoader = object",
    "vllm/sampling_params.py": """
class RequestOutputKind:
    DELTA = "delta"
""",
    # Each request gets a token a step. A step of a guarded engine takes longer.
    "vllm/__init__.py": """
import os
import time
from types import SimpleNamespace as Of

class SamplingParams:
    def __init__(self, max_tokens, temperature, ignore_eos, detokenize, output_kind):
        assert (temperature, ignore_eos, output_kind) == (0.0, True, "delta")
        self.max_tokens = max_tokens

def note(what):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{os.getpid()} {what}\\n")

class Engine:
    def __init__(self):
        self.left = {}
    def add_request(self, name, prompt, params):
        assert len(prompt["prompt_token_ids"]) == 128
        self.left[name] = params.max_tokens
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        if any(left == 512 for left in self.left.values()):
            note("generates")
        from vllm.attention import plan
        time.sleep(plan() / 1000)
        names = list(self.left)
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return [Of(request_id=name, outputs=[Of(token_ids=[1])]) for name in names]

class LLM:
    def __init__(self, **options):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert "VLLM_GPU_SYNC_CHECK" not in os.environ
        note("starts")
        with open(os.environ["NOTES"]) as notes:  # each later than the last
            time.sleep(notes.read().count("starts") % 9 * 0.2)
        if os.environ.get("DIES") == options["attention_config"]["backend"]:
            raise ValueError("no such kernel")
        self.llm_engine = Engine()
""",
}
UNGUARDED = "def plan():\n    return 0.1"
GUARD = """
import contextlib
calls = []
@contextlib.contextmanager
def plan_guard(wrapper):
    calls.append(wrapper)
    yield
"""
GUARDED = """
from vllm.utils import flashinfer_plan_guard as module
from vllm.utils.flashinfer_plan_guard import plan_guard

def plan():
    with plan_guard("wrapper"):
        return 1.0 if module.calls else 0.1
"""


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """Unpatched and patched, of the stand-in; torch is in the folder of both."""
    made = tmp_path / "unpatched", tmp_path / "patched"
    changes: tuple[dict[str, str], ...] = (
        {"vllm/attention.py": UNGUARDED},
        {"vllm/attention.py": GUARDED, "vllm/utils/flashinfer_plan_guard.py": GUARD},
    )
    for tree, own in zip(made, changes, strict=True):
        for name, content in (STANDIN | own).items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(content)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(TORCH)
    return made


def start(folder: Path, *arguments: object, **environment: str) -> subprocess.Popen:
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, str(RUN), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(path), "NOTES": str(folder / "notes")}
        | environment,
    )


def script(
    folder: Path, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    with start(folder, *arguments, **environment) as process:
        said = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def test_engines_measure_in_turn_once_all_have_started(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "a/b"
    done = script(tmp_path, *trees, "--out", out, "engine", VLLM_GPU_SYNC_CHECK="error")
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads((out / "numbers.json").read_text())
    assert numbers["vllm"] == "0.33.0" and numbers["gpu"] == "a stand-in"
    runs = numbers["engine"]["dense-flashinfer"]
    assert [run["form"] for run in runs] == list(FORMS) * 3
    assert [run["form"] for run in numbers["engine"]["sparse-mla-graphs"]] == (
        ["unpatched", "patched"] * 3
    )
    assert [run["steps"] for run in runs] == [3 * 512] * 9
    # The guard was off where it says so, and on where it does not.
    assert ["plans" in run for run in runs] == [False, True, False] * 3
    off, on = runs[1]["itl_ms"]["median"], runs[2]["itl_ms"]["median"]
    assert 0.1 <= off < 1.0 <= on
    assert "dense-flashinfer, patched, tokens/s: " in done.stdout
    assert (out / "numbers.png").exists()

    started, generated = noted(tmp_path, "starts"), noted(tmp_path, "generates")
    # All start and warm up; then each measures its three generations at one go.
    warm_up, measured = generated[:9], generated[9:36]
    assert sorted(warm_up) == sorted(started[:9]) == sorted(set(measured))
    assert len([process for process, _ in itertools.groupby(measured)]) == 9


def noted(folder: Path, what: str) -> list[int]:
    """The processes that have noted it, each as often as it did."""
    notes = folder / "notes"
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [int(line.split()[0]) for line in lines if line.split()[1:] == [what]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_its_engines(
    trees: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    with start(tmp_path, *trees, "--out", tmp_path, "engine") as process:
        deadline = time.monotonic() + 60
        while len(noted(tmp_path, "starts")) < 9 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    started = noted(tmp_path, "starts")
    assert len(started) == 9
    alive = [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not alive


def test_an_engine_that_dies_is_a_row(trees: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = script(tmp_path, *trees, "--out", out, "engine", DIES="FLASHINFER")
    assert done.returncode == 1
    runs = json.loads((out / "numbers.json").read_text())["engine"]
    assert {run["error"] for run in runs["dense-flashinfer"]} == {
        "ended with 1: ValueError: no such kernel"
    }
    assert all("error" not in run for run in runs["sparse-mla-graphs"])
    assert "ValueError: no such kernel" in done.stderr  # its log
    assert "- dense-flashinfer, patched: ended with 1: ValueError" in done.stdout


def test_a_model_without_its_backend_is_left_out(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    (trees[0] / "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py").unlink()
    done = script(tmp_path, *trees, "--out", tmp_path, "engine")
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert list(numbers["engine"]) == ["dense-flashinfer"]


def test_what_fails_leaves_the_other_parts(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    """The stand-in of torch has nothing of what the exchange and MLA need."""
    done = script(tmp_path, *trees, "--out", tmp_path, "eplb", "mla")
    assert done.returncode == 1
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    for part, missing in (("eplb", "torch.distributed"), ("mla", "gpu_sync_debug")):
        for result in numbers[part].values():
            assert result["error"].startswith("ended with 1: ModuleNotFoundError: ")
            assert missing in result["error"]


@pytest.mark.parametrize(
    ("change", "environment", "said"),
    [
        (lambda trees: (trees[0] / "nowhere", trees[1]), {}, "give the folder that does"),
        (lambda trees: (*trees, "engines"), {}, "no part engines; give some of eplb, mla, engine, or none"),
        (lambda trees: trees, {"NO_GPU": "1"}, "there is no NVIDIA GPU; run this where there is one"),
    ],
)  # fmt: skip
def test_bad_input(
    trees: tuple[Path, Path],
    tmp_path: Path,
    change: Any,
    environment: dict[str, str],
    said: str,
) -> None:
    out = tmp_path / "out"
    done = script(tmp_path, *change(trees), "--out", out, **environment)
    refused(done, said)
    assert not out.exists()


def refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_trees_of_two_releases_are_refused(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    (trees[1] / "vllm/_version.py").write_text("__version__ = version = '0.29.0'\n")
    done = script(tmp_path, *trees, "--out", tmp_path)
    refused(done, "vLLM 0.33.0 and 0.29.0; give two trees of one release")


def test_no_matplotlib(trees: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['matplotlib'] = None"
    )
    done = script(tmp_path, *trees, "--out", tmp_path / "out")
    refused(done, "there is no matplotlib, for the plot; pip install matplotlib")
    assert not (tmp_path / "notes").exists()


def test_a_file_in_the_way_of_the_folder(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("")
    done = script(tmp_path, *trees, "--out", tmp_path / "out")
    refused(done, "give another --out")


# ---- What the ranks saw.


def test_ranks_become_a_row(
    trees: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest rank counts in a round, the median over rounds."""
    (tmp_path / "torch/distributed.py").write_text("ProcessGroup = object")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torch", "torch.distributed", "measuring"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    summarise = runpy.run_path(str(BENCHMARKS / "eplb_exchange.py"))["summarise"]
    for name in ("torch", "torch.distributed", "measuring"):
        monkeypatch.delitem(sys.modules, name)

    def stage(gbps: float, host: float, waited: bool) -> dict[str, Any]:
        return {"gbps": gbps, "host_ms": host, "waited": waited}

    one = {
        "first": [9.0],
        "steady": [1.0, 5.0, 3.0],
        "transport": [1.0, 1.0, 1.0],
        "idle": [stage(40.0, 1.0, True)] * 3,
        "busy": [stage(1.0, 2.0, False)] * 3,
        "limit": [50.0] * 3,
    }
    other = one | {
        "first": [7.0],
        "steady": [4.0, 2.0, 2.0],
        "transport": [2.0, 1.0, 1.0],
        "busy": [stage(1.0, 2.0, waited) for waited in (False, True, False)],
    }
    assert summarise([one, other]) == {
        "first_ms": 9.0,
        "steady_ms": 4.0,
        "transport_ms": 1.0,
        "copy_gbps": 40.0,
        "limit_gbps": 50.0,
        "copy_host_ms": 1.0,
        "copy_host_busy_ms": 2.0,
        "waited": True,
    }
    assert not summarise([one, one])["waited"]
