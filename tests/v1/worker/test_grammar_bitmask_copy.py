# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Grammar bitmasks on their way to the GPU, V2 model runner.

With the executor in the scheduler's process, the bitmask that a step gets is a view of
the one that the next step refills, and some grammar backends allocate it pinned.
`StructuredOutputsWorker.apply_grammar_bitmask` copies it to the GPU asynchronously, on
a stream of its own: that copy must not read what the backend may already have refilled.
"""

import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import numpy as np
import pytest
import torch

from vllm.utils import gpu_sync_debug
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

VOCAB_SIZE = 96
MAX_NUM_LOGITS = 8
DELAY = 4_000_000_000  # clock cycles of a long kernel, about two seconds
REQUESTS = ("a", "b", "c", "d")

# Tokens that a step's grammars allow, by request. The others have no grammar.
STEPS = (
    {"c": {5, 40}, "a": {0}},
    {"a": {33, 34, 95}, "c": {64}},
    {"d": {1}, "b": {2}},
    {"b": set(range(VOCAB_SIZE)), "d": {31, 32, 63}},
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def make_worker() -> StructuredOutputsWorker:
    """The released worker, for steps without drafts; releases differ in arguments."""
    arguments = {
        "max_num_logits": MAX_NUM_LOGITS,
        "vocab_size": VOCAB_SIZE,
        "device": torch.device("cuda"),
        "mask_stride": 1,
        "num_bonus_tokens": 1,
    }
    taken = inspect.signature(StructuredOutputsWorker).parameters
    return StructuredOutputsWorker(
        **{name: value for name, value in arguments.items() if name in taken}
    )


def make_batch() -> SimpleNamespace:
    """What the worker reads of a batch of REQUESTS with one token each."""
    starts = np.arange(len(REQUESTS) + 1, dtype=np.int32)
    return SimpleNamespace(
        req_ids=list(REQUESTS),
        cu_num_logits_np=starts,
        cu_num_logits=torch.from_numpy(starts).cuda(),
        num_draft_tokens_per_req=None,
    )


def make_logits() -> list[torch.Tensor]:
    """For each step logits that are all zero."""
    return [torch.zeros(len(REQUESTS), VOCAB_SIZE, device="cuda") for _ in STEPS]


def fill(bitmask: torch.Tensor, step: dict[str, set[int]]) -> np.ndarray:
    """Refills the backend's bitmask; the rows of the step, as the worker gets them."""
    bitmask.zero_()
    rows = bitmask.numpy()
    for row, tokens in zip(rows.view(np.uint32), step.values()):
        for token in tokens:
            row[token // 32] |= np.uint32(1 << token % 32)
    return rows[: len(step)]


def make_bitmask(pinned: bool) -> torch.Tensor:
    """All rows of a grammar backend, one bit a token."""
    return torch.zeros(
        MAX_NUM_LOGITS, VOCAB_SIZE // 32, dtype=torch.int32, pin_memory=pinned
    )


def allowed(logits: torch.Tensor) -> dict[str, set[int]]:
    """The tokens left by request, of requests with a masked token."""
    rows = {
        name: set(row.isfinite().nonzero().flatten().tolist())
        for name, row in zip(REQUESTS, logits.cpu())
    }
    return {name: row for name, row in rows.items() if len(row) < VOCAB_SIZE}


def expected(step: dict[str, set[int]]) -> dict[str, set[int]]:
    return {name: row for name, row in step.items() if len(row) < VOCAB_SIZE}


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", raising=False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_steps_one_after_the_other(pinned: bool) -> None:
    worker, batch, bitmask = make_worker(), make_batch(), make_bitmask(pinned)
    for step, logits in zip(STEPS, make_logits()):
        rows = fill(bitmask, step)
        worker.apply_grammar_bitmask(logits, batch, list(step), rows)
        torch.cuda.synchronize()
        assert allowed(logits) == expected(step)


def in_flight(bitmask: torch.Tensor, strictly: Callable) -> None:
    """Applies all STEPS, the bitmask refilled for each, while their copies wait."""
    worker, batch = make_worker(), make_batch()
    call = worker.apply_grammar_bitmask
    # The first time round compiles, and fills the allocators.
    for apply in (call, strictly(call)):
        of_steps = make_logits()
        torch.cuda.synchronize()
        delay = torch.cuda.Event()
        with torch.cuda.stream(worker.copy_stream):
            torch.cuda._sleep(DELAY)
            delay.record()
        for step, logits in zip(STEPS, of_steps):
            apply(logits, batch, list(step), fill(bitmask, step))
        bitmask.fill_(-1)
        waited = delay.query()
    torch.cuda.synchronize()
    assert not waited, "the steps waited for the GPU"
    for step, logits in zip(STEPS, of_steps):
        assert allowed(logits) == expected(step), "masks that are not their own"


def test_pinned_bitmasks_of_steps_in_flight(strictly: Callable) -> None:
    """Fails unpatched: the copies read the backend's memory after it was refilled."""
    in_flight(make_bitmask(pinned=True), strictly)


def test_pageable_bitmasks_of_steps_in_flight(strictly: Callable) -> None:
    """Right either way: they are staged in pinned memory of the call's own."""
    in_flight(make_bitmask(pinned=False), strictly)
