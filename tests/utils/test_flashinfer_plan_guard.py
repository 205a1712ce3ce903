# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a FlashInfer wrapper plans must arrive, however many plans are in flight.

plan() fills a page-locked workspace of the wrapper and copies it to the GPU
asynchronously. Where the next plan() fills the same memory while that copy still has
to read it, the GPU gets the wrong schedule and computes the wrong attention.

Plans are made by vLLM's own metadata builders and run by the real kernels, on a
stream that a long kernel keeps busy. Schedules and outputs must be bit-equal to those
of the same plans made one after the other. No layout of a schedule is assumed: the
bytes that a plan writes are those that do not depend on what was there before.

The tests below "The guard itself" are of vllm/utils/flashinfer_plan_guard.py.
"""

import dataclasses
import gc
import itertools
import json
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import pytest
import torch

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CUDAGraphMode,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models import ModelRegistry
from vllm.utils import gpu_sync_debug
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

flashinfer = pytest.importorskip("flashinfer")

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
DTYPE = torch.bfloat16
PAGE = 16
MAX_REQS = 16
MAX_LEN = 2048
PREFIX = 4 * PAGE  # tokens, of a cascade
MAX_TOKENS = 2048
SOAK = 10_000  # pairs of a plan and a run
DELAY = 1_000_000_000  # clock cycles of a long kernel, about half a second
WORKSPACE = "_pin_memory_int_workspace_buffer"
CUDA = torch.device("cuda:0")

MODEL = {
    "architectures": ["PlansOnlyForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": MAX_LEN,
    "num_hidden_layers": 1,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 256,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def gpu(test: Callable) -> Callable:
    for mark in (*NEEDS_GPU, pytest.mark.usefixtures("kernels")):
        test = mark(test)
    return test


class PlansOnlyForCausalLM(torch.nn.Module):
    """A model to name in the config, never built: the builder looks at the config."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


ModelRegistry.register_model("PlansOnlyForCausalLM", PlansOnlyForCausalLM)


# --- Batches ---


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests as pairs of context and query length, in tokens."""

    requests: tuple[tuple[int, int], ...]

    @property
    def queries(self) -> list[int]:
        return [query for _, query in self.requests]

    @property
    def lengths(self) -> list[int]:
        return [context + query for context, query in self.requests]

    @property
    def starts(self) -> torch.Tensor:
        offsets = [0, *itertools.accumulate(self.queries)]
        return torch.tensor(offsets, dtype=torch.int32)


def make_batches(count: int, kind: str, seed: int = 0) -> list[Batch]:
    """Batches of the same size of which no two plan alike."""
    rng = random.Random(seed)
    least = 2 * PREFIX  # more than one token on each rank and after each prefix

    def decode() -> tuple[int, int]:
        return rng.randint(least, MAX_LEN - 1), 1

    def prefill() -> tuple[int, int]:
        return rng.randint(least, MAX_LEN - 128), rng.randint(2, 128)

    request = decode if kind in ("decode", "graph", "cascade") else prefill
    size = MAX_REQS if request is decode else 6
    return [Batch(tuple(request() for _ in range(size))) for _ in range(count)]


@cache
def filled(*shape: int) -> torch.Tensor:
    """Queries, keys or values: the same for all batches of a shape."""
    generator = torch.Generator(CUDA).manual_seed(sum(shape))
    return torch.randn(shape, dtype=DTYPE, device=CUDA, generator=generator)


def kv_cache() -> torch.Tensor:
    return filled(MAX_REQS * MAX_LEN // PAGE, 2, PAGE, KV_HEADS, HEAD_DIM)


@cache
def page_table() -> torch.Tensor:
    """Pages of each request, [MAX_REQS, MAX_LEN // PAGE], int32."""
    pages = torch.arange(MAX_REQS * MAX_LEN // PAGE, dtype=torch.int32, device=CUDA)
    return pages.view(MAX_REQS, -1)


# --- Sites: the places that plan ---


class Step(NamedTuple):
    """What a plan has set up: the wrappers planned, and the run of their kernels."""

    wrappers: list[Any]
    run: Callable[[], list[torch.Tensor]]


class Site:
    """A place that plans. prepare() may wait for the GPU, plan() may not."""

    def prepare(self, batch: Batch) -> Any:
        raise NotImplementedError

    def plan(self, prepared: Any) -> Step:
        raise NotImplementedError


class Layer(AttentionLayerBase):
    """What the builder reads from its attention layer."""

    num_heads = HEADS

    def __init__(self, impl: Any) -> None:
        self.impl = impl

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        raise NotImplementedError


def make_config(folder: Path, graph: bool) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_LEN,
            enforce_eager=True,
        ),
        cache_config=CacheConfig(block_size=PAGE),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_REQS,
            max_num_batched_tokens=MAX_TOKENS,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cuda" if torch.cuda.is_available() else "cpu"),
        # Decodes are planned only where they do not take XQA.
        attention_config=AttentionConfig(use_trtllm_attention=False),
    )
    # Afterwards: eager mode takes no graphs, and the engine resolves the layout.
    if graph:
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
        config.compilation_config.max_cudagraph_capture_size = MAX_REQS
    config.cache_config.kv_cache_layout = "LBNHC"
    return config


def make_metadata(batch: Batch, ranks: int) -> CommonAttentionMetadata:
    """The batch as the model runner describes it."""
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    values = {
        "query_start_loc": batch.starts.to(CUDA),
        "query_start_loc_cpu": batch.starts,
        "seq_lens": lengths.to(CUDA),
        "seq_lens_cpu_upper_bound": lengths.clone(),
        "_seq_lens_cpu": lengths.clone(),  # in releases that have it
        "num_reqs": len(batch.requests),
        "num_actual_tokens": sum(batch.queries),
        "max_query_len": max(batch.queries),
        "max_seq_len": max(batch.lengths),
        "block_table_tensor": page_table()[: len(batch.requests)],
        "slot_mapping": torch.zeros(sum(batch.queries), dtype=torch.int64, device=CUDA),
        "is_prefilling": torch.tensor(batch.queries) > 1,
        "dcp_local_seq_lens": (lengths // ranks).to(CUDA),
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{n: v for n, v in values.items() if n in known})


class BuilderSite(Site):
    """vLLM's metadata builder of the FlashInfer backend.

    kind: "decode", "graph" (decode for CUDA graphs), "prefill-fa3", "prefill-fa2",
    "context-parallel" (prefill) or "cascade".
    """

    def __init__(
        self, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.v1.attention.backends import flashinfer as backend

        self.kind = kind
        self.ranks = 1
        if kind == "context-parallel":
            # Another rank would be a process on another GPU; plans exchange nothing.
            self.ranks = 2
            group = SimpleNamespace(world_size=2, rank_in_group=0)
            monkeypatch.setattr(backend, "get_dcp_group", lambda: group)
            monkeypatch.setattr(
                backend,
                "get_dcp_world_size_and_rank",
                lambda *args: (2, 0),
                raising=False,
            )
        config = make_config(folder, graph=kind == "graph")
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=DTYPE
        )
        with set_current_vllm_config(config):
            impl = backend.FlashInferImpl(
                HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, None, None, "auto"
            )
            config.compilation_config.static_forward_context["layer"] = Layer(impl)
            self.builder = backend.FlashInferMetadataBuilder(
                spec, ["layer"], config, CUDA
            )
        if kind == "prefill-fa2":
            # Elsewhere than on SM90, this is what "auto" takes.
            self.builder._get_prefill_wrapper()._backend = "fa2"

    def prepare(self, batch: Batch) -> Any:
        # Once for each build: under context parallelism a build may change them.
        return make_metadata(batch, self.ranks), filled(
            sum(batch.queries), HEADS, HEAD_DIM
        )

    def plan(self, prepared: Any) -> Step:
        common, query = prepared
        prefix = PREFIX if self.kind == "cascade" else 0
        built = self.builder.build(prefix, common)
        if self.kind == "cascade":
            wrapper = built.cascade_wrapper
            return Step(
                wrapper._batch_prefill_wrappers,
                lambda: [wrapper.run(query, kv_cache())],
            )
        if self.kind in ("decode", "graph"):
            wrapper = built.decode.wrapper
            assert wrapper.is_cuda_graph_enabled == (self.kind == "graph")
            return Step([wrapper], lambda: [wrapper.run(query, kv_cache())])
        wrapper = built.prefill.wrapper
        if self.kind == "context-parallel":
            return Step(
                [wrapper._context, wrapper._new_tokens],
                lambda: self.run_context_parallel(wrapper, query),
            )
        assert wrapper._backend == self.kind.removeprefix("prefill-")
        return Step([wrapper], lambda: [wrapper.run(query, kv_cache())])

    def run_context_parallel(
        self, wrapper: Any, query: torch.Tensor
    ) -> list[torch.Tensor]:
        """Both parts, without the collectives that combine them."""
        tokens = len(query)
        gathered = filled(tokens, HEADS * self.ranks, HEAD_DIM)
        key, value = filled(2, tokens, KV_HEADS, HEAD_DIM)
        return [
            *wrapper._context.run(gathered, kv_cache(), return_lse=True),
            *wrapper._new_tokens.run(query, key, value, return_lse=True),
        ]


class GuardedSite(Site):
    """A decode wrapper of the test's own, planned as vLLM plans one."""

    def __init__(self, guard: ModuleType, graph: bool = False) -> None:
        self.guard = guard
        buffers: dict[str, Any] = {}
        if graph:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": make_index(MAX_REQS + 1),
                "paged_kv_indices_buffer": make_index(page_table().numel()),
                "paged_kv_last_page_len_buffer": make_index(MAX_REQS),
            }
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA),
            "NHD",
            use_tensor_cores=True,
            backend="fa2",
            **buffers,
        )

    def prepare(self, batch: Batch) -> Any:
        """Offsets, last page lengths (both pinned) and page indices of the batch."""
        pages = [-(-length // PAGE) for length in batch.lengths]
        offsets = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32)
        last = torch.tensor(
            [(length - 1) % PAGE + 1 for length in batch.lengths], dtype=torch.int32
        )
        indices = torch.cat(
            [row[:n] for row, n in zip(page_table(), pages, strict=False)]
        )
        return offsets.pin_memory(), indices, last.pin_memory()

    def plan(self, prepared: Any) -> Step:
        with self.guard.plan_guard(self.wrapper):
            self.plan_unguarded(prepared)
        return Step([self.wrapper], self.run)

    def plan_unguarded(self, prepared: Any) -> None:
        self.wrapper.plan(
            *prepared,
            *(HEADS, KV_HEADS, HEAD_DIM, PAGE),
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )

    def copy_tables(self, prepared: Any) -> None:
        """Fill the device buffers of a wrapper for CUDA graphs."""
        offsets, indices, last = prepared
        self.wrapper._paged_kv_indptr_buf.copy_(offsets)
        self.wrapper._paged_kv_indices_buf[: len(indices)].copy_(indices)
        self.wrapper._paged_kv_last_page_len_buf.copy_(last)

    def plan_fast(self, prepared: Any) -> None:
        """As vLLM plans for a CUDA graph; what copy_tables() does is left out."""
        flashinfer.decode.fast_decode_plan(
            self.wrapper,
            *prepared,
            *(HEADS, KV_HEADS, HEAD_DIM, PAGE),
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )

    def run(self) -> list[torch.Tensor]:
        query = filled(MAX_REQS, HEADS, HEAD_DIM)
        return [self.wrapper.run(query, kv_cache())]


def make_index(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=CUDA)


# --- Plans, serially and in flight ---


class Result(NamedTuple):
    """What a plan has put on the device, whole workspaces; and what it computes."""

    schedules: list[torch.Tensor]
    outputs: list[torch.Tensor]


class Expected(NamedTuple):
    written: list[torch.Tensor]  # bool, of each byte of a workspace
    result: Result

    def matches(self, found: Result) -> bool:
        schedules = zip(
            self.written, self.result.schedules, found.schedules, strict=True
        )
        outputs = zip(self.result.outputs, found.outputs, strict=True)
        return all(
            torch.equal(want[written], got[written]) for written, want, got in schedules
        ) and all(torch.equal(want, got) for want, got in outputs)


def snapshot(wrapper: Any) -> torch.Tensor:
    """A copy of the wrapper's device workspace, made on the stream."""
    return wrapper._int_workspace_buffer.clone()


def plan_and_run(site: Site, prepared: Any) -> Result:
    step = site.plan(prepared)
    return Result([snapshot(wrapper) for wrapper in step.wrappers], step.run())


def plan_serially(site: Site, batches: Sequence[Batch]) -> list[Expected]:
    """Each plan with the GPU idle."""
    expected = []
    for batch in batches:
        written = bytes_written(site, batch)
        prepared = site.prepare(batch)
        torch.cuda.synchronize()
        result = plan_and_run(site, prepared)
        torch.cuda.synchronize()
        expected.append(Expected(written, result))
    return expected


def bytes_written(site: Site, batch: Batch) -> list[torch.Tensor]:
    """The bytes of the device workspaces that a plan of the batch determines."""
    wrappers = site.plan(site.prepare(batch)).wrappers
    images = []
    for fill in (0x00, 0xFF, 0x00):
        torch.cuda.synchronize()
        for wrapper in wrappers:
            getattr(wrapper, WORKSPACE).fill_(fill)
            wrapper._int_workspace_buffer.fill_(fill)
        # Not run: a kernel might take what is in the gaps for indices.
        site.plan(site.prepare(batch))
        images.append([snapshot(wrapper) for wrapper in wrappers])
    torch.cuda.synchronize()
    zeros, ones, again = images
    assert all(map(torch.equal, zeros, again)), "plans of a batch differ"
    written = [low == high for low, high in zip(zeros, ones, strict=True)]
    assert all(mask.any() and not mask.all() for mask in written)
    return written


def delay_stream(times: int = 1) -> torch.cuda.Event:
    """Keeps the current stream busy, until the event returned."""
    event = torch.cuda.Event()
    torch.cuda._sleep(times * DELAY)
    event.record()
    return event


def plan_only(site: Site, prepared: Any) -> Result:
    step = site.plan(prepared)
    return Result([snapshot(wrapper) for wrapper in step.wrappers], [])


def plan_in_flight(
    site: Site,
    batches: Sequence[Batch],
    step: Callable[[Site, Any], Result] = plan_and_run,
) -> tuple[list[Result], bool]:
    """Plan all while the stream is busy; whether the host got through meanwhile."""
    inputs = [site.prepare(batch) for batch in batches]
    torch.cuda.synchronize()
    long_kernel = delay_stream()
    results = [step(site, each) for each in inputs]
    in_flight = not long_kernel.query()
    torch.cuda.synchronize()
    return results, in_flight


def skip_if_builds_wait(site: Site, batch: Batch) -> None:
    """Skip where vLLM waits for the GPU before it plans: no two plans are in flight.

    A plan behind none never waits for a workspace, so it is not the guard that waits.
    """
    for _ in range(2):  # the first may allocate, which may wait too
        _, in_flight = plan_in_flight(site, [batch], plan_only)
    if not in_flight:
        pytest.skip("this vLLM's builder waits for the GPU before it plans")


def assert_own(expected: Sequence[Expected], found: Sequence[Result]) -> None:
    wrong = [
        index
        for index, (want, got) in enumerate(zip(expected, found, strict=True))
        if not want.matches(got)
    ]
    assert not wrong, f"plans {wrong} of {len(found)} are not their own"


def schedules_of(expected: Sequence[Expected]) -> list[Expected]:
    """Without the outputs."""
    return [
        each._replace(result=Result(each.result.schedules, [])) for each in expected
    ]


def assert_schedules_own(
    site: Site, batches: Sequence[Batch], expected: Sequence[Expected]
) -> None:
    """Plans in flight, none of which is run: a kernel that runs on the schedule of
    another batch may read anywhere, and then ends all CUDA work of the process.
    """
    found, _ = plan_in_flight(site, batches, plan_only)
    assert_own(schedules_of(expected), found)


# --- Fixtures ---


@pytest.fixture(scope="module")
def kernels() -> None:
    """Compile (and load) the kernels, all at once: one takes up to a minute."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an NVIDIA GPU of compute capability 9.x")
    from flashinfer.prefill import get_batch_prefill_module

    dtypes = DTYPE, DTYPE, DTYPE, torch.int32
    options = 0, False, False, False  # no rope, window, soft cap, fp16 reduction
    dims = HEAD_DIM, HEAD_DIM
    wanted = [("fa2", dims), ("fa3", dims)]
    with ThreadPoolExecutor(len(wanted)) as pool:
        for done in [
            pool.submit(get_batch_prefill_module, backend, *dtypes, *dims, *options)
            for backend, dims in wanted
        ]:
            done.result()


MakeSite = Callable[[str], Site]


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSite:
    def make(kind: str) -> Site:
        return BuilderSite(kind, tmp_path, monkeypatch)

    return make


@pytest.fixture
def sync_checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function so that the strict check reports its synchronisations."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


@pytest.fixture
def guard() -> Iterator[ModuleType]:
    """The guard's module, without any spare workspace."""
    module = pytest.importorskip("vllm.utils.flashinfer_plan_guard")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before = module._spares.copy()
    module._spares.clear()
    yield module
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    module._spares.clear()
    module._spares.update(before)


def spares(guard: ModuleType) -> int:
    """How many spare workspaces there are, of all wrappers together."""
    return sum(pool.allocated for pool in guard._spares.values())


# --- vLLM's plans ---


@gpu
@pytest.mark.parametrize(
    "kind, count",
    [
        *itertools.product(("decode", "graph"), (2, 3, 8, 16)),
        *itertools.product(
            (
                "prefill-fa3",
                "prefill-fa2",
                "context-parallel",
                "cascade",
            ),
            (2, 8),
        ),
    ],
)
def test_pinned_plans_in_flight(kind: str, count: int, make_site: MakeSite) -> None:
    """Each plan's schedule and output are its own, and no plan waits for the GPU.

    Unpatched, all but the last plan run with bytes of a later one.
    """
    site = make_site(kind)
    if kind == "cascade" and not hasattr(site.builder, "_get_cascade_wrapper"):
        pytest.skip("no cascade attention in this vLLM")
    batches = make_batches(count, kind)
    expected = plan_serially(site, batches)
    skip_if_builds_wait(site, batches[0])
    assert_schedules_own(site, batches, expected)
    # Rehearse: allocating new device or pinned memory may wait for the GPU.
    plan_in_flight(site, batches)
    found, in_flight = plan_in_flight(site, batches)
    assert in_flight, "the host waited for the long kernel"
    assert_own(expected, found)


@gpu
def test_pinned_first_plan_in_flight(make_site: MakeSite) -> None:
    """The first plan for a CUDA graph is the wrapper's plan(), later ones are not.

    Unpatched, the second rewrites what the first has yet to copy.
    """
    batches = make_batches(8, "graph")
    site = make_site("graph")
    expected = plan_serially(site, batches)
    skip_if_builds_wait(site, batches[0])
    site = make_site("graph")
    # Not while the stream is busy: allocating memory may wait for the GPU.
    site.builder._get_decode_wrapper(MAX_REQS, use_cudagraph=True)
    found, _ = plan_in_flight(site, batches)
    assert_own(expected, found)


@gpu
def test_pinned_graph_replays_in_flight(make_site: MakeSite) -> None:
    """A captured run() reads the plan that was made for its replay."""
    site = make_site("graph")
    batches = make_batches(8, "graph")
    expected = plan_serially(site, batches)
    skip_if_builds_wait(site, batches[0])
    assert_schedules_own(site, batches, expected)
    site.plan(site.prepare(batches[0])).run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    step = site.plan(site.prepare(batches[0]))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        (out,) = step.run()

    def replay(prepared: Any) -> torch.Tensor:
        site.plan(prepared)
        graph.replay()
        return out.clone()

    for warm in (False, True):
        inputs = [site.prepare(batch) for batch in batches]
        torch.cuda.synchronize()
        long_kernel = delay_stream()
        found = [replay(each) for each in inputs]
        if warm:
            assert not long_kernel.query(), "the host waited for the long kernel"
        torch.cuda.synchronize()
    wrong = [
        index
        for index, (want, got) in enumerate(zip(expected, found, strict=True))
        if not torch.equal(want.result.outputs[0], got)
    ]
    assert not wrong, f"replays {wrong} of {len(found)} are not their own"


@gpu
def test_pinned_soak(make_site: MakeSite) -> None:
    """Random plans of three builders at random lags: every output is its own.

    Outputs are compared on the GPU, and looked at once, at the end.
    """
    kinds = "decode", "graph", "prefill-fa3"
    sites = {kind: make_site(kind) for kind in kinds}
    cases = []
    for kind, site in sites.items():
        batches = make_batches(8, kind, seed=1)
        expected = plan_serially(site, batches)
        skip_if_builds_wait(site, batches[0])
        assert_schedules_own(site, batches, expected)
        cases += [
            (kind, want.result.outputs[0], site.prepare(batch))
            for batch, want in zip(batches, expected, strict=True)
        ]
    rng = random.Random(2)
    wrong = torch.zeros(len(kinds), dtype=torch.int64, device=CUDA)
    torch.cuda.synchronize()
    for _ in range(SOAK):
        kind, want, prepared = rng.choice(cases)
        # Of up to 2 ms, now and then of 20 ms: from none in flight to all.
        torch.cuda._sleep(rng.choice((0, 0, 0, 1, 1, 10)) * rng.randint(0, 4_000_000))
        (got,) = sites[kind].plan(prepared).run()
        wrong[kinds.index(kind)] += (got != want).any()
    counts = dict(zip(kinds, wrong.tolist(), strict=True))
    assert not any(counts.values()), f"of {SOAK} outputs {counts} are not their own"


@gpu
@pytest.mark.parametrize("kind", ["decode", "graph", "prefill-fa3"])
def test_strict_check_allows_plans(
    kind: str, make_site: MakeSite, sync_checked: Callable[[Callable], Callable]
) -> None:
    """Builds of plans that are in flight, and more of them than there are workspaces,
    pass under VLLM_GPU_SYNC_CHECK=error. Nothing is run, for vLLM without the guard.
    """
    site = make_site(kind)
    batches = make_batches(20, kind)
    plan_in_flight(site, batches, plan_only)
    on_gpu = torch.ones(1, device=CUDA)
    with pytest.raises(RuntimeError, match="GPU<->CPU sync detected"):
        sync_checked(on_gpu.item)()
    plan_in_flight(site, batches, sync_checked(plan_only))


# --- The guard itself ---


@gpu
def test_no_wait_up_to_sixteen_plans(guard: ModuleType) -> None:
    """No plan waits until as many are in flight as there are workspaces, also where
    each has to allocate its own; the one after that does wait, and is right.
    """
    site = GuardedSite(guard)
    batches = make_batches(guard.MAX_SPARES + 2, "decode")
    expected = plan_serially(site, batches)
    assert spares(guard) == 0, "plans that are not in flight have allocated"
    for allocated in (0, guard.MAX_SPARES):
        assert spares(guard) == allocated
        inputs = [site.prepare(batch) for batch in batches]
        torch.cuda.synchronize()
        # Allocating 15 spares takes 0.1 s, and more on a machine that does more.
        long_kernel = delay_stream(4)
        found = [plan_and_run(site, each) for each in inputs[:-1]]
        assert not long_kernel.query(), "the host waited for the long kernel"
        found.append(plan_and_run(site, inputs[-1]))
        assert long_kernel.query(), "the last plan has rewritten one in flight"
        torch.cuda.synchronize()
        assert_own(expected, found)
    assert spares(guard) == guard.MAX_SPARES


@gpu
def test_wrappers_share_the_spares(guard: ModuleType) -> None:
    """Many wrappers in flight have MAX_SPARES spares together, and each its own
    schedules, whatever another wrapper has left in a spare.
    """
    sites = [GuardedSite(guard, graph=index % 2 == 0) for index in range(4)]
    batches = make_batches(8, "decode")
    expected = [plan_serially(site, batches) for site in sites]
    inputs = [[site.prepare(batch) for batch in batches] for site in sites]
    for _ in range(2):
        torch.cuda.synchronize()
        delay_stream()
        found = [
            [plan_and_run(site, one[turn]) for site, one in zip(sites, inputs)]
            for turn in range(len(batches))
        ]
        torch.cuda.synchronize()
        for wanted, got in zip(expected, zip(*found), strict=True):
            assert_own(wanted, got)
        assert spares(guard) == guard.MAX_SPARES


@gpu
def test_threads_with_streams_of_their_own(guard: ModuleType) -> None:
    """Each thread plans its own wrapper on its own stream; they share the spares."""
    batches = make_batches(8, "decode")
    sites = [GuardedSite(guard) for _ in range(4)]
    expected = [plan_serially(site, batches) for site in sites]
    inputs = [[site.prepare(batch) for batch in batches] for site in sites]
    torch.cuda.synchronize()

    def work(index: int) -> int:
        rng = random.Random(index)
        torch.cuda.set_device(CUDA)
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
            for _ in range(100):
                torch.cuda._sleep(rng.randint(0, 4_000_000))
                chosen = rng.randrange(len(batches))
                (got,) = sites[index].plan(inputs[index][chosen]).run()
                (want,) = expected[index][chosen].result.outputs
                wrong += (got != want).any()
            return int(wrong)

    with ThreadPoolExecutor(len(sites)) as pool:
        wrong = list(pool.map(work, range(len(sites))))
    assert not any(wrong), f"of 100 outputs of each thread {wrong} are not their own"
    assert spares(guard) <= guard.MAX_SPARES


@gpu
def test_threads_with_one_wrapper(guard: ModuleType) -> None:
    """Plans of one wrapper from several threads: one after the other, also where they
    are its first, and each puts its own schedule on the device.
    """
    batches = make_batches(8, "decode")
    expected = plan_serially(GuardedSite(guard), batches)
    site = GuardedSite(guard)
    inputs = [site.prepare(batch) for batch in batches]
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    start = threading.Barrier(len(batches))
    snapshots: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        torch.cuda.set_device(CUDA)
        with torch.cuda.stream(stream):
            start.wait()
            for _ in range(20):
                with guard.plan_guard(site.wrapper):
                    site.plan_unguarded(inputs[index])
                    snapshots[index] = snapshot(site.wrapper)

    for warm in (False, True):
        if warm:
            delay_stream()
        with ThreadPoolExecutor(len(batches)) as pool:
            list(pool.map(work, range(len(batches))))
        torch.cuda.synchronize()
        found = [Result([snapshots[index]], []) for index in range(len(batches))]
        assert_own(schedules_of(expected), found)


@gpu
def test_one_wrapper_on_two_streams(guard: ModuleType) -> None:
    """A plan that is held up on one stream keeps its workspace, while those on
    another stream come and go.
    """
    site = GuardedSite(guard)
    batches = make_batches(5, "decode")
    expected = plan_serially(site, batches)
    inputs = [site.prepare(batch) for batch in batches]
    torch.cuda.synchronize()
    busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
    found = []
    with torch.cuda.stream(busy):
        long_kernel = delay_stream()
        site.plan(inputs[0])
        found.append(snapshot(site.wrapper))
    for each in inputs[1:]:
        with torch.cuda.stream(idle):
            site.plan(each)
            found.append(snapshot(site.wrapper))
        idle.synchronize()
    assert not long_kernel.query(), "the host waited for the long kernel"
    torch.cuda.synchronize()
    # No output: the device workspace is one, and ordering its use is the caller's.
    assert_own(schedules_of(expected), [Result([each], []) for each in found])


@gpu
def test_plan_that_raises(guard: ModuleType) -> None:
    """The wrapper gets its workspace back, and the next plans are right, whether the
    plan raised before its copy or after it.
    """
    site = GuardedSite(guard, graph=True)
    batches = make_batches(5, "decode")
    expected = plan_serially(site, batches)
    own = getattr(site.wrapper, WORKSPACE)
    inputs = [site.prepare(batch) for batch in batches]
    smaller = site.prepare(Batch(batches[0].requests[:-1]))
    torch.cuda.synchronize()
    delay_stream()
    found = []
    for each in inputs:
        found.append(plan_and_run(site, each))
        with pytest.raises(ValueError, match="batch size should be fixed"):
            site.plan(smaller)
        assert getattr(site.wrapper, WORKSPACE) is own
        with pytest.raises(ZeroDivisionError), guard.plan_guard(site.wrapper):
            site.plan_unguarded(inputs[0])
            raise ZeroDivisionError
        assert getattr(site.wrapper, WORKSPACE) is own
    torch.cuda.synchronize()
    assert_own(expected, found)
    assert spares(guard) <= guard.MAX_SPARES


@gpu
def test_plan_captured_in_a_graph(guard: ModuleType) -> None:
    """A graph that holds a plan copies it again at each replay: nothing else may be
    planned into that workspace, for as long as the graph lives.
    """
    site = GuardedSite(guard, graph=True)
    batches = make_batches(guard.MAX_SPARES + 3, "decode")
    expected = plan_serially(site, batches)
    inputs = [site.prepare(batch) for batch in batches]
    own = getattr(site.wrapper, WORKSPACE)
    site.plan(inputs[0]).run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with guard.plan_guard(site.wrapper):
            site.plan_fast(inputs[0])
        captured = snapshot(site.wrapper)
        (out,) = site.run()
    assert getattr(site.wrapper, WORKSPACE) is own
    delay_stream()
    found = [plan_and_run(site, each) for each in inputs[1:]]
    torch.cuda.synchronize()
    assert_own(expected[1:], found)
    site.copy_tables(inputs[0])
    site.wrapper._int_workspace_buffer.zero_()
    for _ in range(2):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_own(expected[:1], [Result([captured], [out])])


@gpu
def test_reset_workspace_between_plans(guard: ModuleType) -> None:
    """reset_workspace_buffer() while plans are in flight: the page-locked workspace
    that it drops is not used by anyone else before its copy has run.
    """
    site = GuardedSite(guard)
    batches = make_batches(8, "decode")
    expected = plan_serially(site, batches)
    inputs = [site.prepare(batch) for batch in batches]
    floats = site.wrapper._float_workspace_buffer
    torch.cuda.synchronize()
    delay_stream()
    found = []
    for each in inputs:
        found.append(plan_and_run(site, each))
        site.wrapper.reset_workspace_buffer(
            floats, torch.empty_like(site.wrapper._int_workspace_buffer)
        )
    torch.cuda.synchronize()
    assert_own(expected, found)
    assert spares(guard) <= guard.MAX_SPARES


@gpu
def test_wrapper_freed_in_flight(guard: ModuleType) -> None:
    """A wrapper that is freed while its plan is in flight: the next wrapper, which may
    well be given the same page-locked memory, does not write to it too early. Once
    the copies have run, nothing is kept.
    """
    batches = make_batches(8, "decode")
    expected = plan_serially(GuardedSite(guard), batches)
    prepared = [GuardedSite(guard).prepare(batch) for batch in batches]
    gc.collect()
    torch.cuda.synchronize()
    delay_stream()
    found, wrappers, buffers = [], [], []
    for each in prepared:
        site = GuardedSite(guard)
        wrappers.append(weakref.ref(site.wrapper))
        buffers.append(weakref.ref(getattr(site.wrapper, WORKSPACE)))
        found.append(plan_and_run(site, each))
        del site
        gc.collect()
        assert wrappers[-1]() is None, "the guard keeps the wrapper"
    torch.cuda.synchronize()
    assert_own(expected, found)
    last = GuardedSite(guard)  # Makes its guard, and lets go of the others'.
    last.plan(prepared[0])
    gc.collect()
    kept = [index for index, buffer in enumerate(buffers) if buffer() is not None]
    assert not kept, f"the guard keeps the workspaces of wrappers {kept}"


@gpu
def test_captured_plan_does_not_outlive_its_wrapper(guard: ModuleType) -> None:
    """The workspace of a captured plan is kept with the wrapper whose graph it is."""
    site = GuardedSite(guard, graph=True)
    inputs = site.prepare(make_batches(1, "decode")[0])
    site.plan(inputs).run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), guard.plan_guard(site.wrapper):
        workspace = weakref.ref(getattr(site.wrapper, WORKSPACE))
        site.plan_fast(inputs)
    gc.collect()
    assert workspace() is not None, "a replay reads memory that was freed"
    del graph, site
    gc.collect()
    assert workspace() is None


def test_other_wrappers_are_left_alone(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned without a guard, which one debug line says for each class."""

    class OtherWrapper:
        def plan(self) -> None:
            pass

    lines = record_debug_lines(guard, monkeypatch)
    for _ in range(3):
        wrapper = OtherWrapper()
        before = vars(wrapper).copy()
        with guard.plan_guard(wrapper):
            wrapper.plan()
            assert vars(wrapper) == before
        assert vars(wrapper) == before
    assert [line for line in lines if "OtherWrapper" in line] == lines[-1:]
    assert len(lines) == 1


def record_debug_lines(guard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def record(message: str, *args: Any, **kwargs: Any) -> None:
        lines.append(message % args)

    monkeypatch.setattr(guard.logger, "debug", record)
    return lines


def test_flashinfer_without_the_workspace(guard: ModuleType) -> None:
    """A wrapper of FlashInfer's that plans in a way unknown to the guard is refused,
    rather than left to race.
    """

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self) -> None:
            self._pin_memory_int_workspace_buffer = torch.empty(1)

        def plan(self) -> None:
            self.renamed_workspace = None

    BatchDecodeWithPagedKVCacheWrapper.__module__ = "flashinfer.decode"
    with pytest.raises(RuntimeError) as caught:
        guard.plan_guard(BatchDecodeWithPagedKVCacheWrapper())
    said = str(caught.value)
    assert "BatchDecodeWithPagedKVCacheWrapper" in said and WORKSPACE in said
    assert "install" in said, "the message does not say what to do"


def test_planner_without_the_workspace(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fast_decode_plan() is a function of its own, and is looked at as well."""
    decode = sys.modules["flashinfer.decode"]

    def fast_decode_plan(self: Any) -> None:
        self.renamed_workspace = None

    monkeypatch.setattr(decode, "fast_decode_plan", fast_decode_plan)
    with pytest.raises(RuntimeError, match=r"fast_decode_plan.*install"):
        guard._check_flashinfer()


def test_workspaces_are_flashinfers(guard: ModuleType) -> None:
    """The attribute that the guard exchanges is the one that the tests look at."""
    assert guard.WORKSPACE == WORKSPACE
    # Of modules that are imported; were they not, there would be nothing to check.
    assert guard._PLANNERS.keys() <= sys.modules.keys()
    guard._check_flashinfer()
