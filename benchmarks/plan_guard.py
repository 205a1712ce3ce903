# SPDX-License-Identifier: Apache-2.0
"""Host time of a FlashInfer plan: unpatched, guarded, and with unpinned workspaces.

    python benchmarks/plan_guard.py [--plans N] [--json FILE]

Needs an NVIDIA GPU, and a patched vLLM beside FlashInfer. Plans are FlashInfer's own
call, and the whole build() of vLLM's metadata builder that makes it at each step. Those
of the three forms take turns in every order, the first two with one wrapper:

- unpatched: the plan alone; in a build(), under a guard that does nothing;
- guarded: the same under vLLM's plan_guard();
- unpinned: the operators' work-around, FlashInfer's workspace in pageable memory.

GPU idle: the GPU has nothing to do. GPU busy: a kernel of 5 ms is queued, and behind it
another plan of the same wrapper; full: a kernel of 10 ms and four plans. That is when a
plan without the guard races. In how many of these the kernel had ended when the last
plan returned, since that or one before it had waited, is printed where there are any.
"""

import argparse
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flashinfer
import pytest
import torch
from measuring import cycles_per_ms, summary

from vllm.utils import flashinfer_plan_guard as guard
from vllm.v1.attention.backends import flashinfer as backend

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/utils"))
import test_flashinfer_plan_guard as regression

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
MAX_LEN = 8192  # tokens of a request
# By load, the kernel that keeps the GPU busy, in ms, and the plans in flight behind it.
LOADS = {"idle": (0.0, 0), "busy": (5.0, 1), "full": (10.0, 4)}
WORKSPACE = guard.WORKSPACE
FORMS = ("unpatched", "guarded", "unpinned")
DTYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


class Batch(NamedTuple):
    """Host tensors (pinned int32) and page indices (int32, on the GPU) of a batch."""

    queries: torch.Tensor  # offsets, [requests + 1]
    pages: torch.Tensor  # offsets, [requests + 1]
    indices: torch.Tensor  # [pages of all requests]
    last: torch.Tensor  # tokens in each request's last page, [requests]


class Case(NamedTuple):
    """What is planned: name, batches, and how to make what plans them.

    `plan` plans by itself, inside `unguarded`, and `guarded` under the guard; both on
    what `make` returns. `wrapper` is the FlashInfer wrapper in that.
    """

    name: str
    batches: list[Any]
    make: Callable[[], Any]
    plan: Callable[[Any, Any], None]
    guarded: Callable[[Any, Any], None]
    wrapper: Callable[[Any], Any]
    unguarded: Callable[[], contextlib.AbstractContextManager[None]] = (
        contextlib.nullcontext
    )


def wrapper_case(
    name: str,
    batches: list[Batch],
    make: Callable[[], Any],
    plan: Callable[[Any, Batch], None],
) -> Case:
    """FlashInfer's plan by itself."""

    def guarded(wrapper: Any, batch: Batch) -> None:
        with guard.plan_guard(wrapper):
            plan(wrapper, batch)

    return Case(name, batches, make, plan, guarded, lambda wrapper: wrapper)


def make_batch(requests: int, query: int, rng: random.Random) -> Batch:
    lengths = [rng.randint(query, MAX_LEN) for _ in range(requests)]
    pages = [0, *itertools.accumulate(-(-length // PAGE) for length in lengths)]

    def pinned(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).pin_memory()

    return Batch(
        pinned([query * index for index in range(requests + 1)]),
        pinned(pages),
        torch.arange(pages[-1], dtype=torch.int32, device="cuda"),
        pinned([(length - 1) % PAGE + 1 for length in lengths]),
    )


def float_workspace() -> torch.Tensor:
    """Enough for any batch. A plan looks at its size alone."""
    return torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


def decode_case(requests: int, floats: torch.Tensor) -> Case:
    """Decode for a CUDA graph, planned as vLLM plans it from the second time on."""
    rng = random.Random(requests)
    batches = [make_batch(requests, 1, rng) for _ in range(4)]

    def make() -> Any:
        def index(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device="cuda")

        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            floats,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=index(requests + 1),
            paged_kv_indices_buffer=index(requests * MAX_LEN // PAGE),
            paged_kv_last_page_len_buffer=index(requests),
            backend="fa2",
        )
        _, pages, indices, last = batches[0]
        sizes = HEADS, KV_HEADS, HEAD_DIM, PAGE
        wrapper.plan(pages, indices, last, *sizes, **DTYPES)
        return wrapper

    def plan(wrapper: Any, batch: Batch) -> None:
        flashinfer.decode.fast_decode_plan(
            wrapper,
            *(batch.pages, batch.indices, batch.last),
            *(HEADS, KV_HEADS, HEAD_DIM, PAGE),
            **DTYPES,
        )

    return wrapper_case(f"decode, {requests} requests", batches, make, plan)


def prefill_case(requests: int, query: int, floats: torch.Tensor) -> Case:
    rng = random.Random(requests)
    batches = [make_batch(requests, query, rng) for _ in range(4)]

    def make() -> Any:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats, "NHD")

    def plan(wrapper: Any, batch: Batch) -> None:
        wrapper.plan(*batch, HEADS, KV_HEADS, HEAD_DIM, PAGE, causal=True, **DTYPES)

    return wrapper_case(f"prefill, {requests} of {query} tokens", batches, make, plan)


def build_case(kind: str, folder: str) -> Case:
    """The build() of vLLM for 64 decodes ("graph") or 6 prefills ("prefill-fa3")."""
    name = {"graph": "build, decode, 64 requests", "prefill-fa3": "build, 6 prefills"}
    regression.MAX_REQS = 64
    site = regression.BuilderSite(kind, Path(folder), pytest.MonkeyPatch())
    batches = [site.prepare(batch) for batch in regression.make_batches(4, kind)]
    nothing = contextlib.nullcontext()

    def make() -> Any:
        made = regression.BuilderSite(kind, Path(folder), pytest.MonkeyPatch())
        for batch in batches[:2]:  # the first plan for a CUDA graph is another one
            made.plan(batch)
        return made

    def build(site: Any, batch: Any) -> None:
        site.builder.build(0, batch[0])

    @contextlib.contextmanager
    def unguarded() -> Iterator[None]:
        backend.plan_guard = lambda wrapper: nothing
        try:
            yield
        finally:
            backend.plan_guard = guard.plan_guard

    def wrapper(site: Any) -> Any:
        return site.plan(batches[0]).wrappers[0]

    return Case(name[kind], batches, make, build, build, wrapper, unguarded)


def measure(
    case: Case, plans: int, busy_cycles: int, in_flight: int
) -> dict[str, dict[str, float]]:
    """Of each form, median and p99 of its plans in us, and the share that waited."""
    pinned, pageable = case.make(), case.make()
    planners = dict(zip(FORMS, (pinned, pinned, pageable), strict=True))
    unpinned = case.wrapper(pageable)
    workspace = torch.empty(getattr(unpinned, WORKSPACE).shape, dtype=torch.uint8)
    setattr(unpinned, WORKSPACE, workspace)
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    waited = dict.fromkeys(FORMS, 0)
    kernel = torch.cuda.Event()
    orders = itertools.cycle(itertools.permutations(FORMS))
    warm_up = plans // 10
    for turn, order in zip(range(warm_up + plans), orders, strict=False):
        for form in order:
            planner, plan, around = planners[form], case.plan, case.unguarded
            if form == "guarded":
                plan, around = case.guarded, contextlib.nullcontext
            batch, *ahead = (
                case.batches[(turn + n) % len(case.batches)]
                for n in range(in_flight + 1)
            )
            torch.cuda.synchronize()
            with around():
                if busy_cycles:
                    torch.cuda._sleep(busy_cycles)
                kernel.record()
                for each in ahead:
                    plan(planner, each)
                start = time.perf_counter_ns()
                plan(planner, batch)
                elapsed = time.perf_counter_ns() - start
            if turn >= warm_up:
                times[form].append(elapsed / 1000)
                waited[form] += bool(busy_cycles) and kernel.query()
    torch.cuda.synchronize()
    return {
        form: summary(times[form]) | {"waited": waited[form] / plans} for form in FORMS
    }


def measure_guard(
    busy_cycles: int, in_flight: int, floats: torch.Tensor
) -> list[float]:
    """Host times of entering and leaving the guard, in microseconds."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats, "NHD")
    times = []
    for _ in range(400):
        torch.cuda.synchronize()
        if busy_cycles:
            torch.cuda._sleep(busy_cycles)
        for _ in range(in_flight):
            with guard.plan_guard(wrapper):
                pass
        start = time.perf_counter_ns()
        with guard.plan_guard(wrapper):
            pass
        times.append((time.perf_counter_ns() - start) / 1000)
    torch.cuda.synchronize()
    return times[100:]


def spare_bytes() -> int:
    """Page-locked memory that the guard has allocated, all wrappers together."""
    return sum(size * pool.allocated for (_, size), pool in guard._spares.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=300, help="of each form")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU; run this where there is one")
    if arguments.plans < 2:
        parser.error("--plans must be 2 or more")

    floats = float_workspace()
    cases = [decode_case(64, floats), decode_case(256, floats)]
    # Its schedule exceeds 64 KiB, above which a pageable copy waits for the stream.
    cases.append(prefill_case(32, 512, floats))
    folder = tempfile.TemporaryDirectory()
    cases += [build_case(kind, folder.name) for kind in ("graph", "prefill-fa3")]
    per_ms = cycles_per_ms()
    loads = {load: (int(ms * per_ms), plans) for load, (ms, plans) in LOADS.items()}
    found: dict[str, Any] = {"microseconds": {}, "guard": {}}

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"FlashInfer {flashinfer.__version__}, {arguments.plans} plans of each form")
    print("the guard alone (enter and exit):")
    for load, behind in loads.items():
        cost = found["guard"][load] = summary(measure_guard(*behind, floats))
        print(f"  GPU {load}: {cost['median']:.1f} us ({cost['p99']:.1f})")
    print("\nhost time of a plan in us: median (p99)\n")
    print(f"{'':28} {'GPU':5}", *(f"{form:>18}" for form in FORMS), f"{'guard':>8}")
    for case, (load, behind) in itertools.product(cases, loads.items()):
        cells = measure(case, arguments.plans, *behind)
        found["microseconds"].setdefault(case.name, {})[load] = cells
        added = cells["guarded"]["median"] / cells["unpatched"]["median"] - 1
        print(
            f"{case.name:28} {load:5}",
            *(f"{c['median']:9.1f} ({c['p99']:6.0f})" for c in cells.values()),
            f"{added:+8.1%}",
            *(
                f"{f} waited: {c['waited']:.0%}"
                for f, c in cells.items()
                if c["waited"]
            ),
        )
    found["spare_bytes"] = spare_bytes()
    print(f"spare workspaces: {spare_bytes() / 2**20:.0f} MiB of page-locked memory")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
