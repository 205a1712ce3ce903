# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Page tables of FlashInfer, from the metadata builder to the GPU.

The builder writes the offsets and last page lengths of a batch into buffers, which it
and plan() copy to the GPU with non_blocking=True. With the V1 model runner a drafter
builds several times a step and nothing waits in between: where the buffers are pinned
and the next build writes to them, the attention of a build reads another one's pages.

The released builder is made from a real config for the V1 model runner, and does all
the allocating. Planning itself takes compiled kernels; what is tested of it is what it
copies.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("flashinfer")

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.models import ModelRegistry
from vllm.utils import gpu_sync_debug
from vllm.v1.attention.backends import flashinfer
from vllm.v1.attention.backends.utils import PerLayerParameters
from vllm.v1.kv_cache_interface import FullAttentionSpec

PAGE = 16
MAX_MODEL_LEN = 4096
# Releases from 0.29 on keep the buffers pageable, and copy from pinned copies.
PINNED = hasattr(flashinfer.FlashInferMetadataBuilder, "_make_buffer")
MODEL = {
    "architectures": ["BuilderOnlyForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": MAX_MODEL_LEN,
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


class BuilderOnlyForCausalLM(torch.nn.Module):
    """A model to name in the config, never built: the builder looks at the config."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


ModelRegistry.register_model("BuilderOnlyForCausalLM", BuilderOnlyForCausalLM)

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


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


class CopyPages:
    """In place of the Triton kernel that copies page indices, without a GPU."""

    def __getitem__(self, grid: tuple[int]) -> Callable:
        def copy(pages, table, stride, offsets, BLOCK_SIZE) -> None:
            for row in range(grid[0]):
                start, end = offsets[row : row + 2].tolist()
                pages[start:end] = table[row, : end - start]

        return copy


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
        return
    monkeypatch.setattr(flashinfer, "_copy_page_indices_kernel", CopyPages())
    with WithoutPinning():
        yield "cpu"


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


@pytest.fixture
def make_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    # What the builder reads from the layers of a model that is built.
    layers = {"layer": PerLayerParameters(-1, None, 1.0)}
    monkeypatch.setattr(flashinfer, "get_per_layer_parameters", lambda *_: layers)

    def make(device: str) -> Any:
        config = make_config(tmp_path, device)
        spec = FullAttentionSpec(
            block_size=PAGE,
            num_kv_heads=MODEL["num_key_value_heads"],
            head_size=MODEL["hidden_size"] // MODEL["num_attention_heads"],
            dtype=torch.bfloat16,
        )
        with set_current_vllm_config(config):
            return flashinfer.FlashInferMetadataBuilder(
                spec, [], config, torch.device(device)
            )

    return make


def make_config(folder: Path, device: str) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(MODEL))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=True,
        ),
        cache_config=CacheConfig(block_size=PAGE),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            max_num_batched_tokens=4096,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig(device),
    )


# Sequence lengths of each batch: full pages, a single token, many pages.
BATCHES = [[16, 100, 33], [1, 4096, 47, 48], [300, 5, 77], [2000, 31, 64]]


def table(number: int, lengths: list[int]) -> list[list[int]]:
    """The pages of each sequence of a batch, no two batches or sequences alike."""
    first = 10000 * number
    pages = MAX_MODEL_LEN // PAGE
    return [
        [first + row * pages + page for page in range(pages)]
        for row in range(len(lengths))
    ]


def compute(builder: Any, lengths: list[int], pages: torch.Tensor) -> dict[str, Any]:
    """Compute the page table of a batch; copies on the stream of what arrives."""
    lens = np.array(lengths, dtype=np.int32)
    count = len(lengths)
    blocks = -(-lens // PAGE)
    indices = builder._compute_flashinfer_kv_metadata(blocks, lens, pages, count, PAGE)
    offsets, last = builder.paged_kv_indptr, builder.paged_kv_last_page_len
    arrived = {
        "pages": indices.clone(),
        "offsets": offsets.gpu[: count + 1].clone(),
        "last page lengths": last.gpu[:count].clone(),
    }
    # plan() is handed the host tensors, and copies them so.
    for name, host in (("offsets", offsets.cpu), ("last page lengths", last.cpu)):
        handed = host[: len(arrived[name])].pin_memory()
        arrived[f"{name} in plan()"] = handed.to(pages.device, non_blocking=True)
    return arrived


def wrong(number: int, arrived: dict[str, Any]) -> list[str]:
    """What differs from what batch `number` should have got."""
    lengths = BATCHES[number]
    blocks = [-(-length // PAGE) for length in lengths]
    rows = zip(table(number, lengths), blocks, strict=True)
    offsets = [0, *itertools.accumulate(blocks)]
    last = [(length - 1) % PAGE + 1 for length in lengths]
    expected = {
        "pages": [page for row, count in rows for page in row[:count]],
        "offsets": offsets,
        "last page lengths": last,
        "offsets in plan()": offsets,
        "last page lengths in plan()": last,
    }
    return [
        f"{name} of build {number}"
        for name, values in expected.items()
        if arrived[name].tolist() != values
    ]


def build_in_flight(builder: Any, build: Callable, delay: int) -> bool:
    """Build all batches behind a long kernel, and check what arrives.

    Returns whether the kernel still ran when the last build was made.
    """
    tables = [
        torch.tensor(table(number, lengths), dtype=torch.int32).to("cuda")
        for number, lengths in enumerate(BATCHES)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(delay)
    long_kernel = torch.cuda.Event()
    long_kernel.record()
    arrived = [
        build(builder, lengths, pages)
        for lengths, pages in zip(BATCHES, tables, strict=True)
    ]
    in_flight = not long_kernel.query()
    torch.cuda.synchronize()
    ills = [ill for number, found in enumerate(arrived) for ill in wrong(number, found)]
    assert not ills, f"{ills}: these are not their own"
    return in_flight


def check_builds_in_flight(builder: Any, strictly: Callable) -> None:
    for number, lengths in enumerate(BATCHES):  # compiles the kernel
        pages = torch.tensor(table(number, lengths), dtype=torch.int32).to("cuda")
        compute(builder, lengths, pages)
        torch.cuda.synchronize()
    build_in_flight(builder, compute, 400_000_000)  # fills the caching allocators
    assert build_in_flight(builder, strictly(compute), 4_000_000_000), (
        "the builds waited for the GPU"
    )


def test_one_build_after_the_other(device: str, make_builder: Callable) -> None:
    """The values are right where the GPU keeps up, and no old ones are left over."""
    builder = make_builder(device)
    for number, lengths in enumerate(BATCHES):
        pages = torch.tensor(table(number, lengths), dtype=torch.int32).to(device)
        arrived = compute(builder, lengths, pages)
        if device == "cuda":
            torch.cuda.synchronize()
        assert not wrong(number, arrived)
        assert builder.paged_kv_indptr.np[0] == 0


@gpu
@pytest.mark.skipif(not PINNED, reason="this release does not pin the buffers")
def test_pinned_page_tables_of_builds_in_flight(
    make_builder: Callable, strictly: Callable
) -> None:
    """Fails unpatched: each build rewrites the buffers under the copies before it."""
    check_builds_in_flight(make_builder("cuda"), strictly)


@gpu
@pytest.mark.skipif(PINNED, reason="this release pins the buffers")
def test_page_tables_of_builds_in_flight(
    make_builder: Callable, strictly: Callable
) -> None:
    """The release's own cure: each copy reads pinned memory of its own."""
    check_builds_in_flight(make_builder("cuda"), strictly)
