# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""M-RoPE positions with multimodal pruning and a drafter, V1 model runner.

Each step writes them to a pinned buffer and copies them to the GPU three times: when
its inputs are prepared, when the embeddings are pruned, and for a drafter that takes
embeddings. The drafter's copy is queued behind the forward pass, and the event that
the next step waits for was recorded before it: that step must not write to memory
which this copy still has to read.

A real runner is made from a config, and goes through its own `synchronize_input_prep`,
`_prepare_inputs` and `_gather_mm_embeddings`. Of the model, it asks for the positions
after pruning, and a stand-in knows them.
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
PROMPT_LENGTHS = (900, 700)
CHUNK = 200  # tokens of each request in a step
CONFIG = {
    "architectures": ["PruningOnlyForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [8, 12, 12],
    },
}


class PruningOnlyForCausalLM(torch.nn.Module):
    """A model to name in the config, and what the runner asks it for when it prunes."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.pruned = [
            torch.randint(1024, (3, length), generator=generator)
            for length in PROMPT_LENGTHS
        ]

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def recompute_mrope_positions(
        self, *, input_ids: list[int], multimodal_embeddings: Any, **_: Any
    ) -> tuple[Any, torch.Tensor, int]:
        return multimodal_embeddings, self.pruned[input_ids[0]], 0


ModelRegistry.register_model("PruningOnlyForCausalLM", PruningOnlyForCausalLM)

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
    """A runner that prunes, with a request for each of PROMPT_LENGTHS."""
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
    config = make_config(tmp_path, request.param, async_scheduling=not on_cpu)
    with WithoutPinning() if on_cpu else nullcontext():
        with set_current_vllm_config(config):
            runner = gpu_model_runner.GPUModelRunner(
                config, torch.device(request.param)
            )
        # What loading a model that prunes would have left.
        runner.model = PruningOnlyForCausalLM(config)
        runner.is_multimodal_pruning_enabled = True
        for number, length in enumerate(PROMPT_LENGTHS):
            state = make_request(number, length)
            runner.requests[state.req_id] = state
            runner.input_batch.add_request(state)
        yield runner


def make_config(folder: Path, device: str, async_scheduling: bool) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=CONFIG["max_position_embeddings"],
            enforce_eager=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        scheduler_config=SchedulerConfig(
            max_model_len=CONFIG["max_position_embeddings"],
            max_num_seqs=len(PROMPT_LENGTHS),
            max_num_batched_tokens=1024,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
        ),
        device_config=DeviceConfig(device),
    )


def make_request(number: int, prompt_length: int) -> CachedRequestState:
    state = CachedRequestState(
        req_id=f"request-{number}",
        prompt_token_ids=[number] * prompt_length,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0),
        generator=None,
        block_ids=(list(range(64 * number, 64 * number + 64)),),
        num_computed_tokens=0,
        output_token_ids=[],
    )
    state.mrope_positions = torch.arange(prompt_length).expand(3, -1).clone()
    state.mrope_position_delta = 0
    return state


def begin(runner: Any, computed: int) -> SchedulerOutput:
    """Prepare a step of a CHUNK of each prompt after `computed` tokens, and prune."""
    count = len(PROMPT_LENGTHS)
    with runner.synchronize_input_prep():
        for state in runner.requests.values():
            state.num_computed_tokens = computed
        runner.input_batch.num_computed_tokens_cpu[:count] = computed
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens = dict.fromkeys(runner.requests, CHUNK)
        step.total_num_scheduled_tokens = CHUNK * count
        runner._prepare_inputs(step, np.full(count, CHUNK, dtype=np.int32))
        runner._gather_mm_embeddings(step)
    return step


def draft(runner: Any, step: SchedulerOutput) -> torch.Tensor:
    """Gather for a drafter; a copy on the stream of the positions it works on."""
    runner._gather_mm_embeddings(step, shift_computed_tokens=1)
    return positions(runner)


def positions(runner: Any) -> torch.Tensor:
    """A copy on the stream of a step's positions on the GPU, [3, tokens of a step]."""
    return runner.mrope_positions.gpu[:, : CHUNK * len(PROMPT_LENGTHS)].clone()


def expected(runner: Any, computed: int) -> torch.Tensor:
    """The positions after pruning, [3, tokens of a step]."""
    chunks = [pruned[:, computed : computed + CHUNK] for pruned in runner.model.pruned]
    return torch.cat(chunks, dim=1)


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", raising=False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


def test_positions_after_pruning(runner: Any) -> None:
    for computed in (0, CHUNK, 2 * CHUNK):
        step = begin(runner, computed)
        assert torch.equal(positions(runner).cpu(), expected(runner, computed))
        assert torch.equal(draft(runner, step).cpu(), expected(runner, computed))
        past = runner.mrope_positions.gpu[:, CHUNK * len(PROMPT_LENGTHS) :]
        assert not past.any(), "positions of no token, which padding looks up"


@pytest.mark.parametrize(
    "runner", [pytest.param("cuda", marks=NEEDS_GPU)], indirect=True
)
def test_pinned_positions_of_the_drafter(runner: Any, strictly: Callable) -> None:
    """Fails unpatched: the drafter's copy reads what the next step has written."""
    # The first time round compiles, and fills the allocators.
    for wrap in (lambda function: function, strictly):
        torch.cuda.synchronize()
        step = wrap(begin)(runner, 0)
        torch.cuda._sleep(DELAY)  # the forward pass
        delay = torch.cuda.Event()
        delay.record()
        drafted = wrap(draft)(runner, step)
        wrap(begin)(runner, CHUNK)
        waited = delay.query()
        following = positions(runner)
    torch.cuda.synchronize()
    assert not waited, "the next step waited for the GPU"
    assert torch.equal(following.cpu(), expected(runner, CHUNK))
    assert torch.equal(drafted.cpu(), expected(runner, 0)), (
        "positions that are not their own"
    )
