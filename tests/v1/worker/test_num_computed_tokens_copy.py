# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Counts of computed tokens on their way to the GPU, V1 model runner.

Under async scheduling with drafts, `_prepare_inputs` copies the counts to the GPU
asynchronously, and the runner subtracts rejected drafts from them on the host at the
end of the step. The copy may still wait behind the last step's draft model then: it
must not read the memory in which the runner subtracts.

A real runner is made from a config, and goes through its own `_prepare_inputs`. Rows
without drafts are looked at, as they take over what was copied. In the runner it is the
rows with drafts that change, which do not: so far the fault does not show in outputs.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
MODEL = {
    "architectures": ["CountsOnlyForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
PROMPT_LENGTHS = (40, 64, 50)
COUNTS = (10, 32, 47)


class CountsOnlyForCausalLM(torch.nn.Module):
    """A model to name in the config, never built: inputs are prepared without it."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


ModelRegistry.register_model("CountsOnlyForCausalLM", CountsOnlyForCausalLM)

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
def runner(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A runner with a request for each of PROMPT_LENGTHS, after their first step."""
    on_cpu = request.param == "cpu"
    if on_cpu:  # has no SMs to count, and mapping slots takes a Triton kernel
        for owner, name in (
            (gpu_model_runner.GPUModelRunner, "_init_device_properties"),
            (block_table.MultiGroupBlockTable, "compute_slot_mapping"),
        ):
            monkeypatch.setattr(owner, name, lambda *_: None, raising=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True, ranks=[0])
    monkeypatch.setattr(gpu_model_runner, "get_pp_group", lambda: group)
    config = make_config(tmp_path, request.param)
    with WithoutPinning() if on_cpu else nullcontext():
        with set_current_vllm_config(config):
            runner = gpu_model_runner.GPUModelRunner(
                config, torch.device(request.param)
            )
        batch = runner.input_batch
        for number, length in enumerate(PROMPT_LENGTHS):
            state = make_request(number, length)
            runner.requests[state.req_id] = state
            batch.add_request(state)
        batch.prev_req_id_to_index = dict(batch.req_id_to_index)
        # What the constructor and the last step's drafter would have left.
        runner.use_async_spec_decode = True
        runner.valid_sampled_token_count_gpu = torch.ones(
            len(COUNTS), dtype=torch.int32, device=request.param
        )
        yield runner


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
        scheduler_config=SchedulerConfig(
            max_model_len=MODEL["max_position_embeddings"],
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig(device),
    )


def make_request(number: int, prompt_length: int) -> CachedRequestState:
    return CachedRequestState(
        req_id=f"request-{number}",
        prompt_token_ids=list(range(prompt_length)),
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0),
        generator=None,
        block_ids=(list(range(8 * number, 8 * number + 8)),),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def prepare(runner: Any) -> torch.Tensor:
    """Prepare a step with COUNTS; a copy on the stream of those that it has there."""
    runner.input_batch.num_computed_tokens_cpu[: len(COUNTS)] = COUNTS
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = dict.fromkeys(runner.requests, 1)
    step.total_num_scheduled_tokens = len(COUNTS)
    runner._prepare_inputs(step, np.ones(len(COUNTS), dtype=np.int32))
    return runner.num_computed_tokens[: len(COUNTS)].clone()


def subtract(runner: Any) -> None:
    runner.input_batch.num_computed_tokens_cpu[: len(COUNTS)] -= 3


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", raising=False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


def test_counts_of_rows_with_and_without_drafts(runner: Any) -> None:
    """Rows with drafts go on from the GPU's own count, the others take the host's."""
    assert tuple(prepare(runner).tolist()) == COUNTS
    runner.prev_num_draft_tokens.np[1] = 2
    runner.valid_sampled_token_count_gpu[1] = 2
    assert prepare(runner).tolist() == [COUNTS[0], COUNTS[1] + 2, COUNTS[2]]


@pytest.mark.parametrize(
    "runner", [pytest.param("cuda", marks=NEEDS_GPU)], indirect=True
)
def test_pinned_counts_in_flight(runner: Any, strictly: Callable) -> None:
    """Fails unpatched: the copy reads what was subtracted after it was issued."""
    # The first time round compiles, and fills the allocators.
    for call in (prepare, strictly(prepare)):
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        delay = torch.cuda.Event()
        delay.record()
        counts = call(runner)
        subtract(runner)
        waited = delay.query()
    torch.cuda.synchronize()
    assert not waited, "preparing waited for the GPU"
    assert tuple(counts.tolist()) == COUNTS, "counts that are not their own"
