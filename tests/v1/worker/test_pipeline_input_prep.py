# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Inputs of overlapping steps under pipeline parallelism, V1 model runner.

The runner prepares each step in the same pinned buffers and copies them to the GPU
with non_blocking=True. Under pipeline parallelism it prepares the next batch while the
copies of this one may wait behind the forward of an earlier one, so it has to wait for
these copies, and only for them, before it writes to the buffers again.

A real runner is made from a config of two pipeline stages, and the steps go through its
own `synchronize_input_prep`, `_update_states` and `_prepare_inputs`. Stages would be
processes on other GPUs, and preparing inputs exchanges nothing with them: of their
group, the runner gets a stand-in.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils import gpu_sync_debug
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import block_table, gpu_model_runner

CUDA = torch.device("cuda:0")
BLOCK_SIZE = 16
DELAY = 4_000_000_000  # clock cycles of a long kernel, about two seconds
MODEL = {
    "architectures": ["RunnerOnlyForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


class RunnerOnlyForCausalLM(torch.nn.Module):
    """A model to name in the config, never built: inputs are prepared without it."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


ModelRegistry.register_model("RunnerOnlyForCausalLM", RunnerOnlyForCausalLM)

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
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    if request.param == "cuda":
        yield CUDA
        return
    # Mapping slots takes a Triton kernel; some releases count multiprocessors.
    table = block_table.MultiGroupBlockTable
    monkeypatch.setattr(table, "compute_slot_mapping", lambda *_: None)
    monkeypatch.setattr(
        gpu_model_runner, "num_compute_units", lambda _: 1, raising=False
    )
    with WithoutPinning():
        yield torch.device("cpu")


@pytest.fixture
def make_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setattr(
        gpu_model_runner,
        "get_pp_group",
        lambda: SimpleNamespace(is_first_rank=True, is_last_rank=False, ranks=[0, 1]),
    )

    def make(device: torch.device, stages: int, async_scheduling=False) -> Any:
        config = make_config(tmp_path, device.type, async_scheduling)
        # Afterwards: VllmConfig would look for as many GPUs.
        config.parallel_config.pipeline_parallel_size = stages
        with set_current_vllm_config(config):
            runner = gpu_model_runner.GPUModelRunner(config, device)
        # Without attention layers there is nothing to reorder a batch for.
        runner.kv_cache_config = KVCacheConfig(0, [], [])
        return runner

    return make


def make_config(folder: Path, device: str, async_scheduling: bool) -> VllmConfig:
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
            max_num_batched_tokens=1024,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
        ),
        device_config=DeviceConfig(device),
    )


@dataclass(frozen=True)
class Step:
    """A step of new requests only, which the step after it finds finished.

    Attributes:
        number: Which step; its requests, tokens and blocks are its own.
        lengths: How many prompt tokens each request has, all of them scheduled.

    """

    number: int
    lengths: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        return [f"step{self.number}-{i}" for i in range(len(self.lengths))]

    @property
    def prompts(self) -> list[list[int]]:
        first = 100 * self.number
        return [[first + i] * length for i, length in enumerate(self.lengths)]

    @property
    def blocks(self) -> list[list[int]]:
        first = 1000 * self.number
        return [
            [first + 10 * i + block for block in range(-(-length // BLOCK_SIZE))]
            for i, length in enumerate(self.lengths)
        ]

    def scheduled(self, finished: list[str]) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(finished)
        output.num_scheduled_tokens = dict(zip(self.names, self.lengths, strict=True))
        output.total_num_scheduled_tokens = sum(self.lengths)
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0),
                pooling_params=None,
                block_ids=(blocks,),
                num_computed_tokens=0,
                lora_request=None,
            )
            for name, prompt, blocks in zip(
                self.names, self.prompts, self.blocks, strict=True
            )
        ]
        return output

    def expected(self) -> dict[str, list]:
        starts = np.cumsum([0, *self.lengths]).tolist()
        return {
            "token ids": [token for prompt in self.prompts for token in prompt],
            "query starts": starts,
            "sequence lengths": list(self.lengths),
            "block table": [block for blocks in self.blocks for block in blocks],
        }


STEPS = (Step(1, (40, 3, 17)), Step(2, (5, 33, 60)))


def prepare(runner: Any, step: Step, finished: list[str]) -> dict[str, Any]:
    """Prepare a step as the runner does; copies on the stream of what it gets."""
    scheduled = step.scheduled(finished)
    with runner.synchronize_input_prep():
        runner._update_states(scheduled)
        runner._prepare_inputs(scheduled, np.array(step.lengths, dtype=np.int32))
    count = len(step.lengths)
    rows = runner.input_batch.block_table[0].block_table.gpu
    return {
        "token ids": runner.input_ids.gpu[: sum(step.lengths)].clone(),
        "query starts": runner.query_start_loc.gpu[: count + 1].clone(),
        "sequence lengths": runner.seq_lens[:count].clone(),
        "block table": [
            rows[row, : len(blocks)].clone() for row, blocks in enumerate(step.blocks)
        ],
    }


def prepare_all(runner: Any, between: Callable[[], Any] = lambda: None) -> list[dict]:
    """Prepare each of STEPS, with `between` called after each.

    What the last one leaves is taken out by the first of the next call: until then its
    copies may read the buffers.
    """
    arrived, finished = [], list(runner.requests)
    for step in STEPS:
        arrived.append(prepare(runner, step, finished))
        finished = step.names
        between()
    return arrived


def wrong(arrived: list[dict]) -> list[str]:
    """What differs from what each of STEPS should have got."""
    return [
        f"{name} of step {step.number}"
        for step, found in zip(STEPS, arrived, strict=True)
        for name, expected in step.expected().items()
        if as_list(found[name]) != expected
    ]


def as_list(value: Any) -> list:
    return (torch.cat(value) if isinstance(value, list) else value).tolist()


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function as a worker runs a step under VLLM_GPU_SYNC_CHECK=error."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


def in_flight(runner: Any, strictly: Callable) -> list[dict]:
    """What arrives of STEPS prepared one after the other on a busy stream."""
    prepare_all(runner, torch.cuda.synchronize)  # compiles, and fills the allocators
    torch.cuda._sleep(DELAY)
    arrived = strictly(prepare_all)(runner)
    torch.cuda.synchronize()
    return arrived


@pytest.mark.parametrize("stages", [1, 2])
def test_steps_one_after_the_other(
    device: torch.device, make_runner: Callable, stages: int
) -> None:
    """The values are right where the GPU keeps up."""
    runner = make_runner(device, stages)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    assert not wrong(prepare_all(runner, wait))


@gpu
def test_pinned_inputs_of_steps_in_flight(
    make_runner: Callable, strictly: Callable
) -> None:
    """Fails unpatched: the second step rewrites what the first's copies read."""
    arrived = in_flight(make_runner(CUDA, stages=2), strictly)
    assert not wrong(arrived), f"{wrong(arrived)}: these are not their own"


@gpu
def test_inputs_of_steps_in_flight_with_async_scheduling(
    make_runner: Callable, strictly: Callable
) -> None:
    """The same overlap on one stage, which vLLM waits for itself."""
    runner = make_runner(CUDA, stages=1, async_scheduling=True)
    assert not wrong(in_flight(runner, strictly))


@gpu
def test_preparing_does_not_wait_for_the_forward(
    make_runner: Callable, strictly: Callable
) -> None:
    """A long kernel after a step's copies, its forward, does not hold up the next."""
    runner = make_runner(CUDA, stages=2)
    prepare_all(runner, torch.cuda.synchronize)  # compiles
    for delay in (DELAY // 10, DELAY):  # the first fills the caching allocators
        forwards: list[torch.cuda.Event] = []

        def forward(delay: int = delay, forwards: list = forwards) -> None:
            torch.cuda._sleep(delay)
            forwards.append(torch.cuda.Event())
            forwards[-1].record()

        arrived = strictly(prepare_all)(runner, forward)
        waited = forwards[0].query()
        torch.cuda.synchronize()
        assert not wrong(arrived)
    assert not waited, "the second step waited for the first's forward"
