# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Step5's sparse prefill plans chunk after chunk, without waiting for the GPU.

A step is cut into chunks of 32 rows. Every sparse layer gathers the selected keys of
each chunk, plans FlashInfer's ragged prefill for it, and runs it. Three faults are
guarded against:

- pageable: plan() copies the offsets of a chunk to the GPU with `non_blocking=True`,
  from memory that is not pinned, and the strict sync check rejects the copies;
- the host waits for each plan to be on the GPU before it makes the next, so the GPU
  runs out of work at every chunk;
- rewritten in flight: it does not wait, and the next plan or the next step writes to
  memory that a copy still has to read.

The GPU tests run the real `Step5FlashInferSparse.run_attention` and its kernels. The
plan of a chunk depends on its number of rows alone, so the chunks below have several.
"""

import importlib
import importlib.util
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vllm.utils import gpu_sync_debug

PACKAGE = "vllm.models.step5.nvidia"
try:
    found = importlib.util.find_spec(f"{PACKAGE}.ops.sparse_prefill")
except ModuleNotFoundError:
    found = None
if found is None:
    pytest.skip("no Step5 in this vLLM", allow_module_level=True)
sparse_prefill = importlib.import_module(f"{PACKAGE}.ops.sparse_prefill")

CUDA = torch.device("cuda:0")
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPE = torch.bfloat16
HEADS, HEAD_DIM = 4, 192  # FlashInfer compiles a module for each head size
CHUNK = 32  # rows
REGION = 8  # tokens
TOPK = 7  # regions, beside the one that the row is in
BLOCK = 16  # tokens
REQUESTS, MAX_LEN = 3, 128
BLOCKS = REQUESTS * MAX_LEN // BLOCK
# Last chunks of 8, 12 and 20 rows. A kernel that runs on the plan of another one of
# these sizes computes wrong values, but finds no index that is out of range.
ROWS = (72, 44, 64, 20)
LAYERS = 2  # With the chunks above: 16 plans, as many as there are workspaces.
DELAY = 1_000_000_000  # clock cycles of a long kernel, about half a second


def gpu(test: Callable) -> Callable:
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


class WithoutPinning(TorchFunctionMode):
    """Makes each call without its pinning, which takes CUDA."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with WithoutPinning() if request.param == "cpu" else nullcontext():
        yield torch.device(request.param)


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


# --- The chunks of a step ---


def make_positions(rows: int) -> list[int]:
    rng = random.Random(rows)
    return [rng.randrange(MAX_LEN) for _ in range(rows)]


def kv_length(position: int) -> int:
    """Tokens in the regions of a row: the last TOPK before its own, and its own."""
    return min(position // REGION, TOPK) * REGION + position % REGION + 1


def make_chunks(positions: list[int], device: torch.device) -> list[Any]:
    return sparse_prefill.make_prefill_chunks(positions, TOPK, device)


def assert_chunks(chunks: list[Any], positions: list[int]) -> None:
    """Each has the offsets of its own rows; those on the GPU are of the whole step."""
    lengths = [kv_length(position) for position in positions]
    offsets = [0, *itertools.accumulate(lengths)]
    starts = range(0, len(positions), CHUNK)
    for chunk, start in zip(chunks, starts, strict=True):
        own = lengths[start : start + CHUNK]
        assert chunk.cu_q.dtype == chunk.cu_k.dtype == torch.int32
        assert chunk.cu_q.tolist() == list(range(len(own) + 1))
        assert chunk.cu_k.tolist() == [0, *itertools.accumulate(own)]
        assert chunk.cu_k_device.tolist() == offsets[start : start + len(own) + 1]
        assert (chunk.total_tokens, chunk.max_length) == (sum(own), max(own))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 200])
def test_chunks_have_the_offsets_of_their_rows(device: torch.device, rows: int) -> None:
    positions = make_positions(rows)
    assert_chunks(make_chunks(positions, device), positions)


def test_chunks_stay_as_they_are(device: torch.device) -> None:
    """The next steps are prepared while copies of these chunks are in flight."""
    steps = [make_positions(rows) for rows in (*ROWS, *ROWS[::-1])]
    of_steps = [make_chunks(positions, device) for positions in steps]
    for chunks, positions in zip(of_steps, steps, strict=True):
        assert_chunks(chunks, positions)


def test_chunks_without_pinned_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM says that memory cannot be pinned, the chunks are not."""
    monkeypatch.setattr(sparse_prefill, "PIN_MEMORY", False, raising=False)
    positions = make_positions(ROWS[0])
    chunks = make_chunks(positions, device)
    assert_chunks(chunks, positions)
    assert not any(chunk.cu_q.is_pinned() for chunk in chunks)
    assert not any(chunk.cu_k.is_pinned() for chunk in chunks)


@gpu
def test_pinned_offsets_of_chunks() -> None:
    """Of 32 rows, they are so few bytes that a pageable copy does not wait either."""
    for chunk in make_chunks(make_positions(ROWS[0]), CUDA):
        assert chunk.cu_q.is_pinned(), "the query offsets are not pinned"
        assert chunk.cu_k.is_pinned(), "the key offsets are not pinned"


# --- Attention ---


class Step(NamedTuple):
    """A step of prefill rows.

    positions and owners (the request of each row) are on the host as well.
    query: [rows, HEADS, HEAD_DIM], regions: [rows, TOPK + 1], sorted, left-padded.
    """

    positions: list[int]
    owners: list[int]
    query: torch.Tensor
    regions: torch.Tensor
    device_positions: torch.Tensor
    device_owners: torch.Tensor


def make_step(rows: int) -> Step:
    rng = random.Random(rows)
    positions = make_positions(rows)
    owners = [rng.randrange(REQUESTS) for _ in positions]
    regions = torch.full((rows, TOPK + 1), -1, dtype=torch.int32)
    for row, position in zip(regions, positions, strict=True):
        own = position // REGION
        selected = [*sorted(rng.sample(range(own), min(own, TOPK))), own]
        row[-len(selected) :] = torch.tensor(selected, dtype=torch.int32)
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(rows, HEADS, HEAD_DIM, generator=generator)
    return Step(
        positions,
        owners,
        query.to(CUDA, DTYPE),
        regions.to(CUDA),
        torch.tensor(positions, device=CUDA),
        torch.tensor(owners, device=CUDA),
    )


class Layer:
    """Keys and values of a sparse layer, and the adapter that all layers share."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        generator = torch.Generator().manual_seed(0)
        shape = BLOCKS, 1, BLOCK, 2 * HEAD_DIM
        self.cache = torch.randn(shape, generator=generator).to(CUDA, DTYPE)
        blocks = torch.randperm(BLOCKS, generator=generator, dtype=torch.int32)
        self.table = blocks.view(REQUESTS, -1).to(CUDA)

    def run(self, step: Step, chunks: list[Any]) -> torch.Tensor:
        # A row that no kernel writes to stays NaN, which equals nothing.
        out = torch.full_like(step.query, float("nan"))
        self.adapter.run_attention(
            step.query,
            self.cache,
            step.regions,
            self.table,
            step.device_owners,
            step.device_positions,
            out,
            HEAD_DIM**-0.5,
            prefill_chunks=chunks,
        )
        return out

    def run_step(self, step: Step, layers: int = LAYERS) -> list[torch.Tensor]:
        """As the model runs it: chunks made once, planned by each layer."""
        chunks = make_chunks(step.positions, CUDA)
        return [self.run(step, chunks) for _ in range(layers)]

    def reference(self, step: Step) -> torch.Tensor:
        """Attention of each row over its regions, gathered here, in float32."""
        table, regions = self.table.cpu(), step.regions.cpu()
        cache, queries = self.cache.cpu().float(), step.query.cpu().float()
        rows = []
        for row, position in enumerate(step.positions):
            selected = regions[row][regions[row] >= 0]
            tokens = (selected[:, None] * REGION + torch.arange(REGION)).flatten()
            tokens = tokens[: kv_length(position)].long()
            blocks = table[step.owners[row], tokens // BLOCK].long()
            keys, values = cache[blocks, 0, tokens % BLOCK].split(HEAD_DIM, -1)
            weights = torch.softmax(queries[row] @ keys.T * HEAD_DIM**-0.5, dim=-1)
            rows.append(weights @ values)
        return torch.stack(rows)


def assert_is_attention(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1 % of each output vector: bf16 rounds to 0.4 %."""
    error = (out.cpu().float() - expected).norm(dim=-1)
    worst = (error / expected.norm(dim=-1)).max().item()
    assert worst < 0.01, f"relative error {worst}"


@pytest.fixture(scope="module")
def layer() -> Layer:
    """Compiles and loads the kernels, which takes a minute."""
    pytest.importorskip("flashinfer")
    sparse = importlib.import_module(f"{PACKAGE}.flashinfer_sparse")
    layer = Layer(sparse.Step5FlashInferSparse(CUDA))
    layer.run_step(make_step(ROWS[0]))
    torch.cuda.synchronize()
    return layer


def run_serially(layer: Layer, steps: list[Step]) -> list[torch.Tensor]:
    """Each chunk by itself, with the GPU idle: the output of a layer, of each step."""
    expected = []
    for step in steps:
        chunks = make_chunks(step.positions, CUDA)
        parts = []
        for chunk, start in zip(chunks, range(0, len(step.positions), CHUNK)):
            rows = slice(start, start + CHUNK)
            part = Step(*(values[rows] for values in step))
            parts.append(layer.run(part, [chunk]))
            torch.cuda.synchronize()
        expected.append(torch.cat(parts))
    return expected


def run_in_flight(
    layer: Layer, steps: list[Step]
) -> tuple[list[list[torch.Tensor]], bool]:
    """Run all while the stream is busy; whether the host got through meanwhile."""
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY)
    long_kernel = torch.cuda.Event()
    long_kernel.record()
    found = [layer.run_step(step) for step in steps]
    in_flight = not long_kernel.query()
    torch.cuda.synchronize()
    return found, in_flight


def assert_own(expected: list[torch.Tensor], found: list[list[torch.Tensor]]) -> None:
    """Equal to the serial run, bit for bit, in each layer and chunk."""
    wrong = [
        (step, number, start)
        for step, (want, layers) in enumerate(zip(expected, found, strict=True))
        for number, got in enumerate(layers)
        for start in range(0, len(want), CHUNK)
        if not torch.equal(want[start : start + CHUNK], got[start : start + CHUNK])
    ]
    assert not wrong, f"chunks {wrong} (step, layer, row) are not their own"


@gpu
@pytest.mark.parametrize("rows", [1, *ROWS])
def test_run_is_attention(layer: Layer, rows: int) -> None:
    step = make_step(rows)
    expected = layer.reference(step)
    for out in layer.run_step(step):
        assert_is_attention(out, expected)


@gpu
def test_strict_check_reports_pageable_copies(strictly: Callable) -> None:
    """Control: the check that the next test relies on does raise."""
    target = torch.empty(1, dtype=torch.int32, device=CUDA)
    pageable = torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="not pinned"):
        strictly(lambda: target.copy_(pageable, non_blocking=True))()


@gpu
@pytest.mark.parametrize("rows", ROWS)
def test_pinned_step_passes_the_strict_check(
    layer: Layer, strictly: Callable[[Callable], Callable], rows: int
) -> None:
    """Unpatched, the check reports the copy of a chunk's query offsets."""
    step = make_step(rows)
    expected = layer.reference(step)
    for out in strictly(layer.run_step)(step):
        assert_is_attention(out, expected)


@gpu
def test_pinned_plans_of_chunks_in_flight(layer: Layer) -> None:
    """16 plans behind a long kernel: none waits, and each chunk's output is its own.

    Unpatched, the second plan waits for that kernel.
    """
    steps = [make_step(rows) for rows in ROWS]
    expected = run_serially(layer, steps)
    # Rehearse: allocating new device or pinned memory may wait for the GPU.
    run_in_flight(layer, steps)
    found, in_flight = run_in_flight(layer, steps)
    assert in_flight, "the host waited for the long kernel"
    assert_own(expected, found)


@gpu
def test_more_plans_than_workspaces(layer: Layer) -> None:
    """As in a long prefill: the host may wait, and each output is its own."""
    steps = [make_step(rows) for rows in (*ROWS, 300, *ROWS[::-1])]
    expected = run_serially(layer, steps)
    for _ in range(2):
        found, _ = run_in_flight(layer, steps)
        assert_own(expected, found)
