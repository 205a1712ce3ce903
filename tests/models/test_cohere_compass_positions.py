# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Positions of Cohere Compass images on their way to the GPU.

The vision tower makes the position ids of each image's patches on the host, and with
multimodal pruning the model does so with the positions of its tokens; both are copied
to the GPU with non_blocking=True. These go through vLLM's own methods here, of a tower
without the layers that they do not pass.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils import gpu_sync_debug

NAME = "vllm.model_executor.models.cohere_compass"
try:
    cohere_compass = importlib.import_module(NAME)
except ModuleNotFoundError as error:
    if error.name != NAME:
        raise
    pytest.skip("this vLLM has no Cohere Compass", allow_module_level=True)

DELAY = 4_000_000_000  # clock cycles of a long kernel, about two seconds
MERGE = 2  # patches of a token, each way
GRIDS = {  # frames, rows and columns of patches; on a GPU, megabytes of positions
    "cpu": [[1, 8, 4], [2, 6, 10]],
    "cuda": [[1, 1024, 512], [2, 512, 512]],
}
TURNED = {device: [[t, w, h] for t, h, w in grids] for device, grids in GRIDS.items()}
CHANNELS = 8

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


class Tower(cohere_compass.Cohere_VisionTransformer):
    """A vision tower without patch embedding, blocks and mergers."""

    def __init__(self, device: str) -> None:
        torch.nn.Module.__init__(self)
        self.spatial_merge_size = MERGE
        self.patch_embed = torch.nn.Module()
        self.patch_embed.proj = torch.nn.Linear(1, 1, device=device)
        # Moved there, as get_rope() makes the same one only once.
        self.rotary_pos_emb = get_rope(
            head_size=32,
            max_position=8192,
            is_neox_style=True,
            rope_parameters={"partial_rotary_factor": 0.5},
        ).to(device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    config = VllmConfig(device_config=DeviceConfig(request.param))
    with (
        WithoutPinning() if request.param == "cpu" else nullcontext(),
        set_current_vllm_config(config),
    ):
        yield request.param


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


def rotations(tower: Tower, grids: list[list[int]]) -> torch.Tensor:
    """Cosines and sines of the patches' positions, [2, patches, rotary dimension]."""
    return torch.stack(tower.rot_pos_emb(grids))


def expected_rotations(tower: Tower, grids: list[list[int]]) -> torch.Tensor:
    """The same patch by patch: rows and columns, in groups of MERGE by MERGE."""
    ids = torch.cat([positions(*grid) for grid in grids])
    tables = tower.rotary_pos_emb.get_cos_sin(max(max(grid[1:]) for grid in grids))
    return torch.stack([table.cpu()[ids].flatten(1) for table in tables])


def positions(frames: int, rows: int, columns: int) -> torch.Tensor:
    """Row and column of each patch in the tower's order, [patches, 2]."""
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    groups = grid.view(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return groups.transpose(1, 2).reshape(-1, 2).repeat(frames, 1)


def with_positions(device: str, sizes: list[list[int]]) -> list[torch.Tensor]:
    """Embeddings of images of these sizes with what pruning adds, by image."""
    model = SimpleNamespace(
        is_multimodal_pruning_enabled=True,
        visual=SimpleNamespace(spatial_merge_size=MERGE),
    )
    grids = torch.tensor(sizes)
    embeddings = tuple(
        torch.full((int(tokens), CHANNELS), float(image), device=device)
        for image, tokens in enumerate(grids.prod(-1) // MERGE**2)
    )
    post = cohere_compass.CohereCompassForConditionalGeneration
    return list(
        post._postprocess_image_embeds_evs(model, embeddings, {"image_grid_thw": grids})
    )


def check_positions(images: list[torch.Tensor], sizes: list[list[int]]) -> None:
    """Frame, row, column, columns of the image, and an unused channel."""
    for number, (image, grid) in enumerate(zip(images, sizes, strict=True)):
        frames, rows, columns = grid[0], grid[1] // MERGE, grid[2] // MERGE
        where = torch.cartesian_prod(*map(torch.arange, (frames, rows, columns)))
        width = torch.full((len(where), 1), columns)
        wanted = torch.cat(
            [
                torch.full((len(where), CHANNELS), number),
                where,
                width,
                torch.zeros_like(width),
            ],
            dim=1,
        )
        assert torch.equal(image.cpu(), wanted.to(image.dtype)), "not their own"


def test_position_ids(device: str) -> None:
    tower = Tower(device)
    found = rotations(tower, GRIDS[device])
    assert torch.equal(found.cpu(), expected_rotations(tower, GRIDS[device]))


def test_positions_with_pruning(device: str) -> None:
    check_positions(with_positions(device, GRIDS[device]), GRIDS[device])


@ON_GPU
def test_pinned_position_ids_in_flight(device: str, strictly: Callable) -> None:
    """Fails unpatched: copied from pageable memory."""
    tower = Tower(device)
    # The first time round fills the allocators.
    for call in (rotations, strictly(rotations)):
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        found = [call(tower, grids[device]) for grids in (GRIDS, TURNED)]
        waited = delay.query()
    assert not waited, "making the position ids waited for the GPU"
    for one, grids in zip(found, (GRIDS, TURNED), strict=True):
        wanted = expected_rotations(tower, grids[device])
        assert torch.equal(one.cpu(), wanted), "ids that are not their own"


@ON_GPU
def test_pinned_positions_with_pruning_in_flight(
    device: str, strictly: Callable
) -> None:
    """Fails unpatched: copied from pageable memory."""
    for call in (with_positions, strictly(with_positions)):
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        found = [call(device, sizes[device]) for sizes in (GRIDS, TURNED)]
        waited = delay.query()
    assert not waited, "adding the positions waited for the GPU"
    for images, sizes in zip(found, (GRIDS, TURNED), strict=True):
        check_positions(images, sizes[device])
