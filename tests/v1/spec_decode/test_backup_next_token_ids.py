# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Backup tokens of steps in flight, V1 model runner.

Where a request has sampled no token, the proposers draft from its backup token, the
last one that the host knows. `prepare_next_token_ids_padded` fills the backup tokens
into pinned memory and copies them to the GPU with non_blocking=True. Under async
scheduling the next step may call it while that copy waits behind the forward: it must
not write to the same memory.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from vllm.utils import gpu_sync_debug
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_input_batch import CachedRequestState

MAX_NUM_SEQS = 8
VOCAB_SIZE = 1000
DELAY = 4_000_000_000  # clock cycles of a long kernel, about two seconds
NO_TOKEN = -1

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# The drafters' kernel is Triton's, the other proposer has none.
PROPOSERS = [
    pytest.param(ExtractHiddenStatesProposer, "cpu", id="extract_hidden_states-cpu"),
    pytest.param(
        ExtractHiddenStatesProposer,
        "cuda",
        id="extract_hidden_states-cuda",
        marks=NEEDS_GPU,
    ),
    pytest.param(EagleProposer, "cuda", id="drafter-cuda", marks=NEEDS_GPU),
]


class WithoutPinning(TorchFunctionMode):
    """Makes each call without its pinning, which takes CUDA."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)


@pytest.fixture(autouse=True)
def without_cuda() -> Iterator[None]:
    with nullcontext() if torch.cuda.is_available() else WithoutPinning():
        yield


@dataclass(frozen=True)
class Step:
    """A step of requests by their last tokens.

    Attributes:
        backup: The last token of each request that the host knows.
        sampled: The token that each has sampled on the GPU; NO_TOKEN for none.
        discarded: Whether it is discarded, as that of a partial prefill.

    """

    backup: tuple[int, ...]
    sampled: tuple[int, ...]
    discarded: tuple[bool, ...]

    def arguments(self, device: str) -> tuple:
        """What the runner calls the proposer with: tensors on `device`."""
        requests = {f"request-{i}": request(t) for i, t in enumerate(self.backup)}
        batch = SimpleNamespace(
            num_reqs=len(requests),
            req_ids=list(requests),
            num_tokens_no_spec=np.array([r.num_tokens for r in requests.values()]),
            vocab_size=VOCAB_SIZE,
        )
        sampled = torch.tensor(self.sampled, dtype=torch.int32, device=device)
        discarded = torch.tensor(self.discarded, dtype=torch.bool, device=device)
        return sampled[:, None], requests, batch, discarded

    def expected(self) -> list[int]:
        return [
            backup if sampled == NO_TOKEN or discarded else sampled
            for backup, sampled, discarded in zip(
                self.backup, self.sampled, self.discarded
            )
        ]


def request(last_token: int) -> CachedRequestState:
    return CachedRequestState(
        req_id="",
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=None,
        generator=None,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[last_token],
    )


def partial_prefills(*backup: int) -> Step:
    """A step that samples no token: all backup tokens are used."""
    count = len(backup)
    return Step(backup, (NO_TOKEN,) * count, (True,) * count)


def make_proposer(kind: type, device: str) -> Any:
    """A proposer with what the call reads, the buffer as its constructor makes it."""
    proposer = object.__new__(kind)
    proposer.device = torch.device(device)
    proposer.backup_next_token_ids = CpuGpuBuffer(
        MAX_NUM_SEQS, dtype=torch.int32, device=proposer.device
    )
    return proposer


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", raising=False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


@pytest.mark.parametrize(("kind", "device"), PROPOSERS)
@pytest.mark.parametrize(
    "step",
    [
        partial_prefills(7),
        partial_prefills(*range(11, 11 + MAX_NUM_SEQS)),
        Step((1, 2, 3, 4), (50, NO_TOKEN, 60, 70), (False, False, True, False)),
        Step((5, NO_TOKEN), (NO_TOKEN, 80), (False, False)),
    ],
    ids=["one", "max_num_seqs", "mixed", "placeholder"],
)
def test_next_tokens(kind: type, device: str, step: Step) -> None:
    proposer = make_proposer(kind, device)
    tokens, _ = proposer.prepare_next_token_ids_padded(*step.arguments(device))
    assert tokens.tolist() == step.expected()


@pytest.mark.parametrize(("kind", "device"), PROPOSERS)
def test_batches_that_grow_and_shrink(kind: type, device: str) -> None:
    proposer = make_proposer(kind, device)
    for count in (3, MAX_NUM_SEQS, 1, 5):
        step = partial_prefills(*range(100 * count, 100 * count + count))
        tokens, _ = proposer.prepare_next_token_ids_padded(*step.arguments(device))
        assert tokens.tolist() == step.expected()


@pytest.mark.parametrize(("kind", "device"), PROPOSERS[1:])
def test_pinned_backup_tokens_of_steps_in_flight(
    kind: type, device: str, strictly: Callable
) -> None:
    """Fails unpatched: each step refills what the copies before it have to read."""
    steps = [
        partial_prefills(11, 12, 13),
        partial_prefills(NO_TOKEN, 22, 23),
        partial_prefills(31, 32, NO_TOKEN),
        partial_prefills(41, 42, 43),
    ]
    proposer = make_proposer(kind, device)
    call = proposer.prepare_next_token_ids_padded
    arguments = [step.arguments(device) for step in steps]
    # The first time round compiles, and fills the allocators.
    for prepare in (call, strictly(call)):
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        arrived = [prepare(*each)[0] for each in arguments]
        waited = delay.query()
    torch.cuda.synchronize()
    assert not waited, "the steps waited for the GPU"
    for step, tokens in zip(steps, arrived):
        assert tokens.tolist() == step.expected(), (
            "backup tokens that are not their own"
        )
