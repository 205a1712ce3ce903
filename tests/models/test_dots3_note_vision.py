# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What dots3's vision tower makes of its images' sizes, on its way to the GPU.

The tower makes the position ids of all patches and the bounds of all frames on the host
and copies both to the GPU with non_blocking=True. They go through its own
`prepare_meta` here, in a tower of one small layer.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vllm.utils import gpu_sync_debug


def import_vision() -> Any:
    """The module of the tower; skips where there is none."""
    try:
        return importlib.import_module("vllm.models.dots3_note.nvidia.vision")
    except ImportError as error:
        if (error.name or "").startswith("vllm.models"):
            pytest.skip("this vLLM has no dots3", allow_module_level=True)
        if torch.cuda.is_available():
            raise
        pytest.skip(
            "needs an NVIDIA GPU: dots3 imports vLLM's compiled flash attention",
            allow_module_level=True,
        )


vision = import_vision()
if not hasattr(vision.DotsMoEVitModel, "prepare_meta"):
    pytest.skip("this vLLM makes them on the GPU", allow_module_level=True)

DELAY = 4_000_000_000  # clock cycles of a long kernel, about two seconds
GRIDS = {  # frames, rows and columns of patches; on a GPU, megabytes of each
    "cpu": [[1, 4, 6], [3, 2, 8]],
    "cuda": [[1, 4, 6], [1_500_000, 1, 1], [2, 512, 512]],
}

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ON_GPU = pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=NEEDS_GPU)], indirect=True
)


class WithoutPinning(TorchFunctionMode):
    """Makes each call without its pinning, which takes CUDA."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with WithoutPinning() if request.param == "cpu" else nullcontext():
        yield request.param


@pytest.fixture
def tower(device: str) -> Any:
    config = vision.DotsMoEVitConfig(
        embed_dim=16,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attn_implementation="sdpa",
        adapter_in_dim=16,
        adapter_out_dim=16,
        pyramid_num_routed=[0],
        enable_torch_compile=False,
    )
    return vision.DotsMoEVitModel(config).to(device)


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", raising=False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


def both(device: str) -> tuple[list[list[int]], list[list[int]]]:
    """The images of GRIDS, and the same the other way round."""
    return GRIDS[device], GRIDS[device][::-1]


def check_rotations(tower: Any, cosines: torch.Tensor, grids: list[list[int]]) -> None:
    """The tower's cosines, [1, patches, 1, head], from rows and columns of patches."""
    ids = torch.cat(
        [
            torch.cartesian_prod(torch.arange(h), torch.arange(w)).repeat(t, 1)
            for t, h, w in grids
        ]
    )
    table = tower.rotary_pos_emb(max(max(grid[1:]) for grid in grids)).cos().cpu()
    wanted = table[ids].flatten(1).repeat(1, 2)
    torch.testing.assert_close(cosines[0, :, 0].cpu(), wanted, msg="not their own")


def check_bounds(bounds: torch.Tensor, grids: list[list[int]]) -> None:
    """Where each frame starts, and the last ends, [frames + 1]."""
    lengths = [torch.tensor([0])] + [
        torch.tensor([h * w]).expand(t) for t, h, w in grids
    ]
    assert bounds.dtype == torch.int32
    wanted = torch.cat(lengths).cumsum(0)
    assert torch.equal(bounds.cpu().long(), wanted), "bounds that are not their own"


def test_images(tower: Any, device: str) -> None:
    meta = tower.prepare_meta(torch.tensor(GRIDS[device]))
    check_bounds(meta.cu_seqlens, GRIDS[device])
    check_rotations(tower, meta.rotary_pos_emb[0], GRIDS[device])


@ON_GPU
def test_pinned_position_ids_in_flight(
    tower: Any, device: str, strictly: Callable
) -> None:
    """Fails unpatched: copied from pageable memory."""
    # The first time round fills the allocators.
    for call in (tower.rot_pos_emb, strictly(tower.rot_pos_emb)):
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        found = [call(torch.tensor(grids)) for grids in both(device)]
        waited = delay.query()
    assert not waited, "making the position ids waited for the GPU"
    for angles, grids in zip(found, both(device), strict=True):
        check_rotations(tower, angles.cos().repeat(1, 2)[None, :, None], grids)


@ON_GPU
def test_pinned_bounds_in_flight(
    tower: Any, device: str, strictly: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails unpatched: copied from pageable memory. Without the position ids."""
    angles = torch.zeros(1, 4, device=device)
    monkeypatch.setattr(tower, "rot_pos_emb", lambda grids: angles)
    for call in (tower.prepare_meta, strictly(tower.prepare_meta)):
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        found = [call(torch.tensor(grids)) for grids in both(device)]
        waited = delay.query()
    assert not waited, "making the bounds waited for the GPU"
    for meta, grids in zip(found, both(device), strict=True):
        check_bounds(meta.cu_seqlens, grids)
