# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranges of bidirectional attention, from FlashAttention's builder to the GPU.

For models whose image tokens attend to each other, the metadata builder fills a buffer
with the range that each query token is in, and copies it to the GPU with
non_blocking=True. Where the copy reads pinned memory that the next build fills again,
the image tokens of one step are masked by the ranges of the next.

The released builder is made from a real config, and does all the allocating. FA4, which
reads the ranges, is not needed to build them.
"""

import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import pytest
import torch
from torch.overrides import TorchFunctionMode

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
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

flash_attn = importlib.import_module("vllm.v1.attention.backends.flash_attn")
if not hasattr(flash_attn, "fill_mm_prefix_query_ranges"):
    pytest.skip("the builder makes its ranges anew each time", allow_module_level=True)

BLOCK_SIZE = 16
MAX_TOKENS = 16384  # 128 KiB of ranges: a pageable copy of so much blocks the host
MODEL = {
    "architectures": ["BuilderOnlyForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with WithoutPinning() if request.param == "cpu" else nullcontext():
        yield request.param


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


@pytest.fixture
def make_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    # The version that masks by range; asking for it takes the compiled library.
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *_, **__: 4)

    def make(device: str) -> Any:
        config = make_config(tmp_path, device)
        # Not in its model_arch_config: on CUDA, the config has looked already.
        config.model_config.is_mm_prefix_lm = True
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=MODEL["num_key_value_heads"],
            head_size=MODEL["hidden_size"] // MODEL["num_attention_heads"],
            dtype=torch.bfloat16,
        )
        with set_current_vllm_config(config):
            return flash_attn.FlashAttentionMetadataBuilder(
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
            max_model_len=MODEL["max_position_embeddings"],
            enforce_eager=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_model_len=MODEL["max_position_embeddings"],
            max_num_seqs=16,
            max_num_batched_tokens=MAX_TOKENS,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig(device),
    )


@dataclass(frozen=True)
class Batch:
    """Prefills as pairs of context and query length; images as ranges by request."""

    prefills: list[tuple[int, int]]
    images: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def metadata(self, device: str) -> CommonAttentionMetadata:
        queries = [query for _, query in self.prefills]
        lengths = torch.tensor([sum(each) for each in self.prefills], dtype=torch.int32)
        starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(queries),
            num_actual_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=int(lengths.max()),
            block_table_tensor=torch.zeros(len(queries), 1, dtype=torch.int32).to(
                device
            ),
            slot_mapping=torch.zeros(sum(queries), dtype=torch.int64).to(device),
            mm_req_doc_ranges=self.images,
        )

    def ranges(self) -> list[list[int]]:
        """The range that each query token is in, [-1, -1] outside all."""
        return [
            next(
                ([s, e] for s, e in self.images.get(request, []) if s <= position <= e),
                [-1, -1],
            )
            for request, (context, query) in enumerate(self.prefills)
            for position in range(context, context + query)
        ]


# Images before, across and after the scheduled tokens, and several in one request.
BATCHES = [
    Batch([(0, 40), (100, 20), (7, 1)], {0: [(3, 9), (20, 30)], 1: [(90, 105)]}),
    Batch([(0, 61)], {0: [(0, 60)]}),
    Batch([(5, 30), (0, 31)], {0: [(0, 4)], 1: [(1, 12), (25, 99)]}),
]
LARGE = [
    Batch([(0, MAX_TOKENS)], {0: [(index, MAX_TOKENS - 1)]}) for index in range(1, 5)
]


def build_in_flight(builder: Any, batches: list[Batch], strictly: Callable) -> list:
    """What arrives of each build, all of them made behind a long kernel."""

    def build_all(delay: int) -> tuple[list[torch.Tensor], bool]:
        metadata = [batch.metadata("cuda") for batch in batches]
        torch.cuda.synchronize()
        torch.cuda._sleep(delay)
        long_kernel = torch.cuda.Event()
        long_kernel.record()
        # The tensor on the GPU is the builder's too; its stream keeps that in order.
        arrived = [
            strictly(builder.build)(0, each).mm_prefix_query_range_tensor.clone()
            for each in metadata
        ]
        in_flight = not long_kernel.query()
        torch.cuda.synchronize()
        return arrived, in_flight

    build_all(400_000_000)  # fills the caching allocators
    arrived, in_flight = build_all(4_000_000_000)
    assert in_flight, "the builds waited for the GPU"
    return [tensor.tolist() for tensor in arrived]


@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_ranges_of_one_batch(device: str, make_builder: Callable, batch: Batch) -> None:
    built = make_builder(device).build(0, batch.metadata(device))
    assert built.mm_prefix_query_range_tensor.tolist() == batch.ranges()


@pytest.mark.parametrize("images", [{}, {0: [(100, 120)]}], ids=["none", "later"])
def test_no_ranges(device: str, make_builder: Callable, images: dict) -> None:
    """No image among the scheduled tokens: attention is causal, with no mask."""
    built = make_builder(device).build(0, Batch([(0, 40)], images).metadata(device))
    assert built.mm_prefix_query_range_tensor is None


@gpu
@pytest.mark.parametrize("batches", [BATCHES, LARGE], ids=["small", "large"])
def test_pinned_ranges_of_builds_in_flight(
    make_builder: Callable, strictly: Callable, batches: list[Batch]
) -> None:
    """Fails unpatched: each build rewrites the buffer under the copies before it."""
    arrived = build_in_flight(make_builder("cuda"), batches, strictly)
    wrong = [i for i, batch in enumerate(batches) if arrived[i] != batch.ranges()]
    assert not wrong, f"ranges of builds {wrong} of {len(batches)} are not their own"
