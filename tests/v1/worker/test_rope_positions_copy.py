# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Positions of M-RoPE and XD-RoPE on their way to the GPU, V1 model runner.

Each step `_prepare_inputs` fills the first columns of a pinned buffer, a row for each
rope dimension, and copies them to the GPU with non_blocking=True. Copied at once these
columns are a strided source, which torch gathers into pageable memory first; behind a
busy stream the host then waits for it.

A real runner is made from a config, and goes through its own `_prepare_inputs`. The
copy is of megabytes, as a small one from pageable memory can return at once.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_GPU_SYNC_CHECK"] = "error"

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils import gpu_sync_debug
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import block_table, gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

BLOCK_SIZE = 16
DELAY = 4_000_000_000  # clock cycles of a long kernel, about two seconds
LENGTH = 262_144  # tokens of a prompt, and of a step
# Of each request, the prompt tokens that are computed and those scheduled.
CHUNKS = ((0, LENGTH // 2), (48, LENGTH // 2 - 100))
DIMENSIONS = {"mrope": 3, "xdrope": 4}
CONFIG = {
    "architectures": ["PositionsOnlyForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": LENGTH,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
ROPE: dict[str, dict[str, Any]] = {
    "mrope": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 12, 12],
        }
    },
    "xdrope": {"xdrope_section": [8, 8, 8, 8]},
}


class PositionsOnlyForCausalLM(torch.nn.Module):
    """A model to name in the config, never built: inputs are prepared without it."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


ModelRegistry.register_model("PositionsOnlyForCausalLM", PositionsOnlyForCausalLM)

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
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
        return
    # Has no SMs to count, and mapping slots takes a Triton kernel.
    for owner, name in (
        (gpu_model_runner.GPUModelRunner, "_init_device_properties"),
        (block_table.MultiGroupBlockTable, "compute_slot_mapping"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: None, raising=False)
    with WithoutPinning():
        yield "cpu"


@pytest.fixture(params=DIMENSIONS)
def runner(
    request: pytest.FixtureRequest,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A runner with a request for each of CHUNKS, which knows its positions."""
    rope = request.param
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True, ranks=[0])
    monkeypatch.setattr(gpu_model_runner, "get_pp_group", lambda: group)
    config = make_config(tmp_path, device, rope)
    with set_current_vllm_config(config):
        runner = gpu_model_runner.GPUModelRunner(config, torch.device(device))
    if not hasattr(runner, f"{rope}_positions"):
        assert rope == "xdrope", "a runner without M-RoPE"
        pytest.skip("this vLLM has no XD-RoPE any more")
    generator = torch.Generator().manual_seed(0)
    for number, (computed, _) in enumerate(CHUNKS):
        state = make_request(number, computed)
        positions = torch.randint(
            LENGTH, (DIMENSIONS[rope], LENGTH), generator=generator
        )
        setattr(state, f"{rope}_positions", positions)
        runner.requests[state.req_id] = state
        runner.input_batch.add_request(state)
    runner.rope = rope
    return runner


def make_config(folder: Path, device: str, rope: str) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(CONFIG | ROPE[rope]))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=LENGTH,
            enforce_eager=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        scheduler_config=SchedulerConfig(
            max_model_len=LENGTH,
            max_num_seqs=len(CHUNKS),
            max_num_batched_tokens=LENGTH,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig(device),
    )


def make_request(number: int, computed: int) -> CachedRequestState:
    blocks = LENGTH // BLOCK_SIZE
    return CachedRequestState(
        req_id=f"request-{number}",
        prompt_token_ids=[number] * LENGTH,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0),
        generator=None,
        block_ids=(list(range(number * blocks, (number + 1) * blocks)),),
        num_computed_tokens=computed,
        output_token_ids=[],
    )


def prepare(runner: Any) -> torch.Tensor:
    """Prepare a step of CHUNKS; a copy on the stream of the positions it has there."""
    lengths = np.array([length for _, length in CHUNKS], dtype=np.int32)
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = dict(
        zip(runner.requests, lengths.tolist(), strict=True)
    )
    step.total_num_scheduled_tokens = int(lengths.sum())
    runner._prepare_inputs(step, lengths)
    buffer = getattr(runner, f"{runner.rope}_positions")
    return buffer.gpu[:, : step.total_num_scheduled_tokens].clone()


def expected(runner: Any) -> torch.Tensor:
    """The positions of CHUNKS, [rope dimensions, tokens of the step]."""
    return torch.cat(
        [
            getattr(state, f"{runner.rope}_positions")[:, start : start + length]
            for state, (start, length) in zip(
                runner.requests.values(), CHUNKS, strict=True
            )
        ],
        dim=1,
    )


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", raising=False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


def test_positions_of_chunks(runner: Any) -> None:
    assert torch.equal(prepare(runner).cpu(), expected(runner))


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=NEEDS_GPU)], indirect=True
)
def test_pinned_positions_in_flight(runner: Any, strictly: Callable) -> None:
    """Fails unpatched: the host waits for a copy from pageable memory."""
    # The first time round compiles, and fills the allocators.
    for call in (prepare, strictly(prepare)):
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        positions = call(runner)
        waited = delay.query()
    assert not waited, "preparing waited for the GPU: copied from pageable memory"
    assert torch.equal(positions.cpu(), expected(runner))
