# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Multimodal inputs that cannot be stacked, on their way to the GPU.

`MultiModalFieldConfig` says how the items of a batch are put together: stacked in
pinned memory where their shapes agree, and else copied one by one, with
non_blocking=True. The items go through its own `build_elems` and `reduce_data` here.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.utils import gpu_sync_debug

DELAY = 4_000_000_000  # clock cycles of a long kernel, about two seconds
# Rows of 3072 bytes: megabytes on a GPU.
ROWS = {"cpu": (5, 3, 7), "cuda": (3000, 5000, 4000)}
WIDTH = 768

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
EVERYWHERE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
)
ON_GPU = pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])


class WithoutPinning(TorchFunctionMode):
    """Makes each call without its pinning, which takes CUDA."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)


def pixels(seed: int, *rows: int) -> list[torch.Tensor]:
    """Pixels of one image for each of `rows`, [rows, WIDTH], no two alike."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, WIDTH, generator=generator) for count in rows]


def differing(device: str, seed: int = 0) -> tuple[Any, list[torch.Tensor]]:
    """Images of different sizes, a tensor each."""
    images = pixels(seed, *ROWS[device])
    return MultiModalFieldConfig.batched("image"), images


def shared(device: str, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """One tensor for all items of the batch."""
    (whole,) = pixels(seed, sum(ROWS[device]))
    return MultiModalFieldConfig.shared("image", batch_size=3), whole


def gapped(device: str, seed: int = 0) -> tuple[Any, list[torch.Tensor]]:
    """Columns of pinned pixels, which are not contiguous, of different sizes."""
    images = pixels(seed, *ROWS[device])
    if device != "cpu":
        images = [image.pin_memory() for image in images]
    return MultiModalFieldConfig.batched("image"), [i[:, : WIDTH // 2] for i in images]


def send(config: Any, items: Any, device: str) -> Any:
    elements = list(config.build_elems("pixel_values", items))
    field = elements[0].field
    return field.reduce_data(elements, device=device, pin_memory=device != "cpu")


def check(arrived: Any, items: Any, device: str) -> None:
    for found, sent in zip(as_list(arrived), as_list(items), strict=True):
        assert found.device.type == device
        assert torch.equal(found.cpu(), sent), "items that are not their own"


def as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", raising=False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


@EVERYWHERE
@pytest.mark.parametrize("make", [differing, shared, gapped])
def test_items(device: str, make: Callable) -> None:
    with WithoutPinning() if device == "cpu" else nullcontext():
        config, items = make(device)
        check(send(config, items, device), items, device)


@EVERYWHERE
def test_items_that_stay_on_the_host(device: str) -> None:
    """Sizes of images are not pinned: nothing copies them."""
    config = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    items = pixels(0, *ROWS["cpu"])
    with WithoutPinning() if device == "cpu" else nullcontext():
        arrived = send(config, items, device)
    check(arrived, items, "cpu")
    assert not any(tensor.is_pinned() for tensor in as_list(arrived))


@ON_GPU
@pytest.mark.parametrize("make", [differing, shared, gapped])
def test_pinned_items_in_flight(
    device: str, make: Callable, strictly: Callable
) -> None:
    """Fails unpatched: the host waits for a copy from pageable memory."""
    batches = [make(device, seed) for seed in (1, 2)]
    # The first time round fills the allocators.
    for call in (send, strictly(send)):
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        arrived = [call(config, items, device) for config, items in batches]
        waited = delay.query()
    assert not waited, "sending waited for the GPU: copied from pageable memory"
    for found, (_, items) in zip(arrived, batches, strict=True):
        check(found, items, device)
