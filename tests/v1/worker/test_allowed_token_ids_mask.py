# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The mask of allowed token ids on its way to the GPU, V1 model runner.

Whenever the batch changes, `InputBatch.refresh_metadata` copies the mask to the GPU
with non_blocking=True: a byte for each request and token, True where the token is not
allowed. The batch here is a real one, and goes through its own `add_request`,
`remove_request`, `condense` and `refresh_metadata`.
"""

import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vllm.sampling_params import SamplingParams
from vllm.utils import gpu_sync_debug
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

VOCABULARY = 131_072  # two megabytes of mask for 16 requests
BLOCK_SIZE = 16
DELAY = 4_000_000_000  # clock cycles of a long kernel, about two seconds
# Of each request, None for all.
ALLOWED: tuple[list[int] | None, ...] = (
    [3, VOCABULARY - 1],
    None,
    list(range(100, 200)),
    [7],
)

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class WithoutPinning(TorchFunctionMode):
    """Makes each call without its pinning, which takes CUDA."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return func(*args, **kwargs)


def make_batch(device: str) -> InputBatch:
    """A batch of 16 requests at most, with those of ALLOWED."""
    options = {
        "max_num_reqs": 16,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "device": torch.device(device),
        "pin_memory": device != "cpu",
        "vocab_size": VOCABULARY,
        "block_sizes": [BLOCK_SIZE],
        "kernel_block_sizes": [BLOCK_SIZE],
        "max_num_blocks_per_req": [16],
    }
    known = inspect.signature(InputBatch).parameters
    batch = InputBatch(**{name: options[name] for name in options if name in known})
    for number, allowed in enumerate(ALLOWED):
        batch.add_request(
            CachedRequestState(
                req_id=f"request-{number}",
                prompt_token_ids=[1, 2, 3],
                mm_features=[],
                sampling_params=SamplingParams(
                    temperature=0.0, allowed_token_ids=allowed
                ),
                generator=None,
                block_ids=([number],),
                num_computed_tokens=0,
                output_token_ids=[],
            )
        )
    return batch


def forbidden(*requests: int) -> torch.Tensor:
    """The mask of these of ALLOWED, [requests, VOCABULARY]."""
    mask = torch.zeros(len(requests), VOCABULARY, dtype=torch.bool)
    for row, number in enumerate(requests):
        if (allowed := ALLOWED[number]) is not None:
            mask[row] = True
            mask[row, allowed] = False
    return mask


def arrived(batch: InputBatch) -> torch.Tensor:
    return batch.sampling_metadata.allowed_token_ids_mask.cpu()


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", raising=False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_mask_of_a_batch_that_changes(device: str) -> None:
    with WithoutPinning() if device == "cpu" else nullcontext():
        batch = make_batch(device)
        batch.refresh_metadata()
        assert torch.equal(arrived(batch), forbidden(0, 1, 2, 3))
        batch.remove_request("request-0")
        batch.condense()
        batch.refresh_metadata()
        assert batch.req_ids == ["request-3", "request-1", "request-2"]
        assert torch.equal(arrived(batch), forbidden(3, 1, 2))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_pinned_mask_in_flight(device: str, strictly: Callable) -> None:
    """Fails unpatched: the mask is pageable."""
    # The first time round fills the allocators.
    for refresh in (InputBatch.refresh_metadata, strictly(InputBatch.refresh_metadata)):
        batch = make_batch(device)
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        refresh(batch)
        waited = delay.query()
    mask = batch.allowed_token_ids_mask_cpu_tensor
    assert mask.is_pinned(), "the mask is not pinned"
    assert not waited, "refreshing waited for the GPU"
    assert torch.equal(arrived(batch), forbidden(0, 1, 2, 3))
