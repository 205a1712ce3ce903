# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What FLASHINFER_MLA_SPARSE_SM90 plans must arrive, without a GPU sync.

`_SM90State` stages the query offsets, KV offsets and KV lengths of a plan in
three host buffers that it reuses, and FlashInfer copies what it is handed to
the GPU with `non_blocking=True`. Two faults are guarded against:

- pageable: the staging buffers themselves are handed over. The strict sync
  check rejects the copies, and above 64 KiB the host waits for the stream at
  the third;
- rewritten in flight: the memory handed over is pinned, but the next plan
  writes to it while the copy of the last plan still has to read it.

Every GPU test uses the real FlashInfer wrapper and SM90 kernels. Without a
GPU, a recording wrapper takes its place for what can be said of host memory.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import pytest
import torch

from vllm.utils import gpu_sync_debug

MODULE = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90"
if importlib.util.find_spec(MODULE) is None:
    pytest.skip("no SM90 FlashInfer sparse MLA in this vLLM", allow_module_level=True)
sm90 = importlib.import_module(MODULE)

try:
    FLASHINFER = tuple(
        int(part)
        for part in importlib.metadata.version("flashinfer-python").split(".")[:2]
    )
except importlib.metadata.PackageNotFoundError:
    FLASHINFER = None

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
GPU_MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
)
LATENT = 512  # kv_lora_rank, the only one that the kernel has
TOPK = 2048
DELAY = 2_000_000_000  # clock cycles of a long kernel, about one second
# (rope head size, KV cache dtype): FlashInfer compiles a kernel for each.
KERNELS = tuple(
    itertools.product((0, 64), (torch.bfloat16, torch.float8_e4m3fn)),
)
CKV_SCALE = 0.375


def gpu(test: Callable) -> Callable:
    for mark in GPU_MARKS:
        test = mark(test)
    return test


class RecordingWrapper:
    """In place of FlashInfer's wrapper where there is no GPU.

    It fills the reserved buffers with what plan() is handed; no schedule.
    """

    def __init__(self, workspace: torch.Tensor, **reserved: Any) -> None:
        self._qo_indptr_buf = reserved["qo_indptr"]
        self._kv_indptr_buf = reserved["kv_indptr"]
        self._kv_len_arr_buf = reserved["kv_len_arr"]
        self._int_workspace_buffer = torch.zeros(4, dtype=torch.uint8)
        self._plan_info = [0] * 18
        self._planned_backend = self

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._qo_indptr_buf.copy_(qo_indptr)
        self._kv_indptr_buf.copy_(kv_indptr)
        self._kv_len_arr_buf.copy_(kv_len_arr)


def make_state(
    device: torch.device,
    max_tokens: int = 64,
    heads: int = 16,
    rope: int = 64,
    kv_dtype: torch.dtype = torch.bfloat16,
    topk: int = TOPK,
) -> Any:
    """A real `_SM90State`; its parameters differ between releases."""
    values = {
        "device": device,
        "num_heads": heads,
        "kv_dtype": kv_dtype,
        "max_tokens": max_tokens,
        "topk_width": topk,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": rope,
        "sm_scale": (LATENT + rope) ** -0.5,
        "index_topk": topk,
        "index_kpool": 1,
    }
    parameters = inspect.signature(sm90._SM90State).parameters
    return sm90._SM90State(**{name: values[name] for name in parameters})


def plan(state: Any, kv_lens: list[int]) -> None:
    """Plan one query row for each KV length; the lengths are exact."""
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    # Where plan() also takes a device batch layout, None says "exact".
    layout = [None] * (len(inspect.signature(state.plan).parameters) - 2)
    state.plan(len(kv_lens), lens, *layout)


def make_plans(rows: list[int], topk: int = TOPK) -> list[list[int]]:
    """KV lengths of one plan for each number of rows, no two alike."""
    rng = random.Random(0)
    return [[rng.randint(1, topk) for _ in range(count)] for count in rows]


def staging_buffers(state: Any) -> list[torch.Tensor]:
    return [state._qo_cpu, state._kv_cpu, state._lens_cpu]


def device_buffers(state: Any) -> list[torch.Tensor]:
    wrapper = state.wrapper
    return [wrapper._qo_indptr_buf, wrapper._kv_indptr_buf, wrapper._kv_len_arr_buf]


def assert_planned(state: Any, kv_lens: list[int]) -> None:
    """The device buffers hold the plan of these lengths."""
    qo, kv, lens = (buffer.cpu() for buffer in device_buffers(state))
    rows = len(kv_lens)
    assert qo.tolist() == [min(row, rows) for row in range(state.max_tokens + 1)]
    assert lens[:rows].tolist() == kv_lens
    # Rows are packed, or each has the width of the top-k, by the release.
    packed = [0, *itertools.accumulate(kv_lens)]
    strided = [row * state.topk_width for row in range(rows + 1)]
    assert kv[: rows + 1].tolist() in (packed, strided)
    assert (kv[rows:] == kv[rows]).all()


def record_handed_over(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> list[list[torch.Tensor]]:
    """The host tensors of each plan, as the wrapper's plan() is handed them."""
    handed_over: list[list[torch.Tensor]] = []
    real_plan = state.wrapper.plan

    def recording_plan(qo_indptr, kv_indptr, kv_indices, kv_len_arr, *args, **kwargs):
        handed_over.append([qo_indptr, kv_indptr, kv_len_arr])
        real_plan(qo_indptr, kv_indptr, kv_indices, kv_len_arr, *args, **kwargs)

    monkeypatch.setattr(state.wrapper, "plan", recording_plan)
    return handed_over


@pytest.fixture(scope="module")
def kernels() -> None:
    """Compile (and load) the kernels, all at once: one takes up to a minute."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an NVIDIA GPU of compute capability 9.x")
    if FLASHINFER is None:
        pytest.skip("needs FlashInfer")
    with ThreadPoolExecutor(len(KERNELS)) as pool:
        for done in [
            pool.submit(plan, make_state(CUDA, rope=rope, kv_dtype=kv_dtype), [1])
            for rope, kv_dtype in KERNELS
        ]:
            done.result()
    torch.cuda.synchronize()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU_MARKS)])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> torch.device:
    if request.param == "cuda":
        request.getfixturevalue("kernels")
        return CUDA
    # What a machine without a GPU lacks: FlashInfer, CUDA streams, pinning.
    flashinfer_mla = ModuleType("flashinfer.mla")
    flashinfer_mla.BatchMLAPagedAttentionWrapper = RecordingWrapper
    monkeypatch.setitem(sys.modules, "flashinfer.mla", flashinfer_mla)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sm90, "PIN_MEMORY", False, raising=False)
    return CPU


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Calls a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return lambda fn, *args: gpu_sync_debug.with_gpu_sync_check(fn)(*args)


# --- what is handed over ---------------------------------------------------


def test_staging_buffers_stay_pageable(device: torch.device) -> None:
    """The planned values arrive, and the buffers stay pageable and the same.

    They must stay pageable: `pin_memory()` returns a pinned tensor as it is,
    without a copy. Were the reused buffers pinned, FlashInfer's copies would
    read the buffers themselves, and the next plan would rewrite them first.
    """
    state = make_state(device)
    before = staging_buffers(state)
    for kv_lens in make_plans([64, 1, 17, 40]):
        plan(state, kv_lens)
        assert_planned(state, kv_lens)
        after = staging_buffers(state)
        assert all(new is old for new, old in zip(after, before, strict=True))
        assert not any(buffer.is_pinned() for buffer in after)


def test_plan_without_pinned_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory cannot be pinned, none is, and the values arrive as well."""
    monkeypatch.setattr(sm90, "PIN_MEMORY", False, raising=False)
    state = make_state(device)
    handed_over = record_handed_over(state, monkeypatch)
    for kv_lens in make_plans([64, 1, 17]):
        plan(state, kv_lens)
        assert_planned(state, kv_lens)
        assert not any(tensor.is_pinned() for tensor in handed_over[-1])


@gpu
def test_strict_check_reports_pageable_copies(
    kernels: None, strictly: Callable
) -> None:
    """Control: the check that the next test relies on does raise."""
    target = torch.empty(1, dtype=torch.int32, device=CUDA)
    pageable = torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="not pinned"):
        strictly(lambda: target.copy_(pageable, non_blocking=True))


@gpu
def test_pinned_plan_passes_the_strict_check(
    kernels: None, strictly: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan() hands over pinned tensors, and each plan gets tensors of its own.

    Unpatched, the strict check reports the copy of the first of the three.
    """
    state = make_state(CUDA)
    handed_over = record_handed_over(state, monkeypatch)
    planned = []
    for kv_lens in make_plans([64, 1, 17]):
        strictly(plan, state, kv_lens)
        planned.append([buffer.clone() for buffer in staging_buffers(state)])
        assert_planned(state, kv_lens)
    # Looked at after all plans: none has written to what an earlier one gave.
    for tensors, values in zip(handed_over, planned, strict=True):
        assert all(tensor.is_pinned() for tensor in tensors)
        assert all(map(torch.equal, tensors, values))


# --- plans in flight -------------------------------------------------------


class Snapshot(NamedTuple):
    """Copies, made on the stream, of what a plan has put on the device."""

    buffers: list[torch.Tensor]
    workspace: torch.Tensor
    plan_info: list[int]

    def tensors(self) -> list[torch.Tensor]:
        return [buffer.cpu() for buffer in self.buffers]

    def schedule(self) -> list[torch.Tensor]:
        """The part of FlashInfer's integer workspace that run() reads.

        plan_info is the cluster size, the number of clusters, and the byte
        offsets of 14 arrays: 3 of an entry a work item, 5 (of the merge) of an
        entry a multiprocessor, 5 of an entry a work item, and the offsets of
        each cluster's work items. Past the last item there is no value.
        """
        words = self.workspace.cpu().view(torch.int32)
        cluster_size, clusters, *offsets = self.plan_info[:16]
        starts = [offset // 4 for offset in offsets]
        indptr = words[starts[13] : starts[13] + clusters + 1]
        items, processors = int(indptr[-1]), cluster_size * clusters
        lengths = [items] * 3 + [processors] * 5 + [items] * 5
        arrays = zip(starts[:13], lengths, strict=True)
        return [indptr, *(words[start : start + size] for start, size in arrays)]


def snapshot(state: Any) -> Snapshot:
    return Snapshot(
        [buffer.clone() for buffer in device_buffers(state)],
        state.wrapper._int_workspace_buffer.clone(),
        [int(value) for value in state.wrapper._plan_info],
    )


def plan_serially(state: Any, plans: list[list[int]]) -> list[Snapshot]:
    snapshots = []
    for kv_lens in plans:
        plan(state, kv_lens)
        torch.cuda.synchronize()
        assert_planned(state, kv_lens)
        snapshots.append(snapshot(state))
        torch.cuda.synchronize()
    return snapshots


def plan_behind_long_kernel(
    state: Any, plans: list[list[int]]
) -> tuple[list[Snapshot], bool]:
    """Plan all while the stream is busy; did the host get through meanwhile?"""
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY)
    long_kernel = torch.cuda.Event()
    long_kernel.record()
    snapshots = []
    for kv_lens in plans:
        plan(state, kv_lens)
        snapshots.append(snapshot(state))
    in_flight = not long_kernel.query()
    torch.cuda.synchronize()
    return snapshots, in_flight


def assert_plans_are_their_own(part: Callable) -> None:
    """Eight plans in flight: what each puts on the device is its own."""
    state = make_state(CUDA)
    plans = make_plans([64, 1, 17, 40, 5, 33, 2, 50])
    expected = plan_serially(state, plans)
    # Rehearse: allocating new device or pinned memory may wait for the GPU.
    plan_behind_long_kernel(state, plans)
    found, in_flight = plan_behind_long_kernel(state, plans)
    assert in_flight, "the host waited for the long kernel"
    wrong = [
        index
        for index, (want, got) in enumerate(zip(expected, found, strict=True))
        if not all(map(torch.equal, part(want), part(got)))
    ]
    assert not wrong, f"plans {wrong} of {len(plans)} are not their own"


@gpu
def test_tensors_of_plans_in_flight(kernels: None) -> None:
    """The copies are below 64 KiB: pageable ones are staged at once and pass as
    well. It fails where pinned memory is reused between plans.
    """
    assert_plans_are_their_own(Snapshot.tensors)


@gpu
@pytest.mark.skipif(
    FLASHINFER is not None and FLASHINFER >= (0, 7),
    reason="FlashInfer 0.7 and later copy each schedule from memory of its own",
)
def test_pinned_schedules_of_plans_in_flight(kernels: None) -> None:
    """FlashInfer before 0.7 fills one page-locked workspace at each plan. Unpatched,
    nothing keeps it from doing so while the copy of the last plan has yet to read it.
    """
    assert_plans_are_their_own(Snapshot.schedule)


@gpu
@pytest.mark.skipif(
    FLASHINFER is None or FLASHINFER < (0, 7),
    reason="FlashInfer before 0.7 needs vLLM's guard for that",
)
def test_schedules_of_plans_in_flight(kernels: None) -> None:
    """FlashInfer's own part: it copies each schedule from memory of its own."""
    assert_plans_are_their_own(Snapshot.schedule)


@gpu
def test_pinned_plan_does_not_wait_for_the_stream(kernels: None) -> None:
    """A plan with copies of 128 KiB returns while a long kernel runs.

    Unpatched, the host waits for that kernel: the third pageable copy of more
    than 64 KiB in flight is made once the stream gets there.
    """
    state = make_state(CUDA, max_tokens=32768, topk=128)
    plans = make_plans([256, 100], topk=128)
    expected = plan_serially(state, plans)
    plan_behind_long_kernel(state, plans)  # A rehearsal, as above.
    found, in_flight = plan_behind_long_kernel(state, plans[:1])
    assert in_flight, "the host waited for the long kernel"
    assert all(map(torch.equal, expected[0].tensors(), found[0].tensors()))


# --- the kernel ------------------------------------------------------------


class Inputs(NamedTuple):
    """Of one run(): queries, KV cache, and each row's top-k cache slots."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor


def make_inputs(
    kv_lens: list[int], heads: int, rope: int, kv_dtype: torch.dtype, seed: int
) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    rows, cache_slots = len(kv_lens), 2 * TOPK
    slots = torch.full((rows, TOPK), -1, dtype=torch.int32)
    for row, length in enumerate(kv_lens):
        slots[row, :length] = torch.randperm(cache_slots, generator=rng)[:length]
    q_nope = torch.randn(rows, heads, LATENT, generator=rng)
    q_pe = torch.randn(rows, heads, rope, generator=rng)
    cache = torch.randn(cache_slots, 1, LATENT + rope, generator=rng)
    return Inputs(
        q_nope.to(CUDA, torch.bfloat16),
        q_pe.to(CUDA, torch.bfloat16),
        cache.to(kv_dtype).to(CUDA),
        slots.to(CUDA),
    )


def run(state: Any, inputs: Inputs) -> torch.Tensor:
    """Fill the wrapper's indices as the backend does, and run the kernel."""
    slots = inputs.slots
    if hasattr(state, "pack_indices"):
        state.pack_indices(slots)
    else:  # A row has the width of the top-k; no slot may be negative.
        state.kv_indices[: slots.numel()] = slots.clamp(min=0).flatten()
    scales = {}
    if state.kv_dtype == torch.float8_e4m3fn:
        scales = {"ckv_scale": CKV_SCALE, "kpe_scale": 1.0}
    ckv, kpe = inputs.cache[..., :LATENT], inputs.cache[..., LATENT:]
    return state.wrapper.run(inputs.q_nope, inputs.q_pe, ckv, kpe, **scales)


def reference(state: Any, inputs: Inputs, kv_lens: list[int]) -> torch.Tensor:
    """Each row's attention over its own slots, in float64."""
    cache = inputs.cache.float().double().squeeze(1)
    if state.kv_dtype == torch.float8_e4m3fn:
        cache[:, :LATENT] *= CKV_SCALE
    queries = torch.cat([inputs.q_nope, inputs.q_pe], dim=-1).double()
    out = []
    for row, length in enumerate(kv_lens):
        keys = cache[inputs.slots[row, :length].long()]
        weights = torch.softmax(queries[row] @ keys.T * state.sm_scale, dim=-1)
        out.append(weights @ keys[:, :LATENT])
    return torch.stack(out)


def assert_is_attention(
    out: torch.Tensor, state: Any, inputs: Inputs, kv_lens: list[int]
) -> None:
    """Within 1 % of each output vector: bf16 rounds to 0.4 %."""
    expected = reference(state, inputs, kv_lens)
    error = (out[: len(kv_lens)].double() - expected).norm(dim=-1)
    worst = (error / expected.norm(dim=-1)).max().item()
    assert worst < 0.01, f"relative error {worst}"


RAGGED = [1, 2, 63, 64, 65, 127, 128, 129, TOPK - 1, TOPK, *make_plans([14])[0]]


@gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    "rope, kv_dtype",
    KERNELS,
    ids=[f"rope{rope}-{str(kv_dtype)[6:]}" for rope, kv_dtype in KERNELS],
)
def test_planned_run_is_attention(
    kernels: None, rope: int, kv_dtype: torch.dtype, heads: int
) -> None:
    """The kernel reads the plan: one CTA a cluster (16 heads) and two (128)."""
    state = make_state(CUDA, max_tokens=32, heads=heads, rope=rope, kv_dtype=kv_dtype)
    # A second plan of fewer rows: nothing may be left of the first.
    for seed, kv_lens in enumerate((RAGGED, RAGGED[5:20])):
        inputs = make_inputs(kv_lens, heads, rope, kv_dtype, seed)
        plan(state, kv_lens)
        assert_is_attention(run(state, inputs), state, inputs, kv_lens)


@gpu
@pytest.mark.parametrize(
    "rope, kv_dtype",
    [(64, torch.bfloat16), (0, torch.float8_e4m3fn)],
    ids=["rope64-bfloat16", "rope0-float8_e4m3fn"],
)
def test_graph_replays_the_new_plan(
    kernels: None, rope: int, kv_dtype: torch.dtype
) -> None:
    """A captured run() reads what a plan after the capture has put there."""
    state = make_state(CUDA, max_tokens=32, rope=rope, kv_dtype=kv_dtype)
    inputs = make_inputs(RAGGED, state.num_heads, rope, kv_dtype, seed=0)
    plan(state, RAGGED)
    run(state, inputs)  # Loads what cannot be loaded during a capture.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(state, inputs)

    # Other lengths, and fewer rows. What those past the last hold has no meaning:
    # FlashInfer before 0.7 writes to them, and nobody reads them.
    for seed, kv_lens in enumerate((RAGGED, RAGGED[::-1], RAGGED[5:14])):
        padding = [1] * (len(RAGGED) - len(kv_lens))
        fresh = make_inputs(
            kv_lens + padding, state.num_heads, rope, kv_dtype, seed=seed
        )
        for captured, new in zip(inputs, fresh, strict=True):
            captured.copy_(new)
        out.fill_(float("nan"))
        plan(state, kv_lens)
        graph.replay()
        torch.cuda.synchronize()
        assert_is_attention(out, state, inputs, kv_lens)
