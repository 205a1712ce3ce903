# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Context lengths of MLA prefills, from the metadata builders to the GPU.

The sparse and the dense MLA metadata builder subtract the query lengths from the
sequence lengths of the prefills and hand the difference to
`build_mla_chunked_context_metadata`, which copies it to the GPU with
non_blocking=True. Two faults are guarded against:

- the difference is computed into pageable memory: the copy is not asynchronous. The
  driver stages two of more than 64 KiB, and blocks the host at the third in flight;
- the difference is computed into a pinned buffer that the next build rewrites while
  the copy of this one still reads it.

Released builders are made from a real config, and they do all the allocating. Without
CUDA nothing can be pinned: the same bodies run there, and what is checked instead is
which tensors the builders asked to be pinned.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils import gpu_sync_debug
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadataBuilder
from vllm.v1.attention.ops import dcp
from vllm.v1.kv_cache_interface import MLAAttentionSpec

BLOCK_SIZE = 64
MAX_MODEL_LEN = 163840
HELPER = "build_mla_chunked_context_metadata"

# Of each kind the released builder, and the module that looks up the helper. Neither
# builder needs compiled operators.
BUILDERS = {
    "sparse": (FlashInferMLASparseMetadataBuilder, sparse_mla_attention),
    "dense": (TritonMLAMetadataBuilder, mla_attention),
}
# The shape of DeepSeek-V3.2, with a single small layer.
MODEL = {
    "architectures": ["BuildersOnlyForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": MAX_MODEL_LEN,
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}


class BuildersOnlyForCausalLM(torch.nn.Module):
    """A model to name in the config, never built: the builders look at the config, and
    vLLM's own model of this shape needs compiled operators to be so much as inspected.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


ModelRegistry.register_model("BuildersOnlyForCausalLM", BuildersOnlyForCausalLM)

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def gpu(test: Callable) -> Callable:
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


on_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
)
both_builders = pytest.mark.parametrize("kind", BUILDERS)
both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64], ids=["int32", "int64"]
)


@dataclass(frozen=True)
class Ranks:
    """How many ranks share a batch."""

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp}-dcp{self.dcp}-pcp{self.pcp}-interleave{self.interleave}"


ALL_RANKS = [
    Ranks(),
    Ranks(tp=2, dcp=2),
    Ranks(tp=4, dcp=4, interleave=16),
    Ranks(pcp=2),
    Ranks(pcp=2, dcp=2),
]


@dataclass(frozen=True)
class Batch:
    """Decodes of one token, then prefills as pairs of context and query length."""

    decodes: int
    prefills: list[tuple[int, int]]

    @property
    def contexts(self) -> list[int]:
        return [context for context, _ in self.prefills]


# Prefills with and without context; contexts that share a chunk, that are split at
# its end, and that span several. The dense builder takes queries of more than one
# token for prefills, the sparse one those above 128.
MIXED = Batch(
    decodes=3,
    prefills=[
        (0, 140),
        (20000, 129),
        (1, 131),
        (0, 129),
        (0, 200),
        (30000, 129),
        (45001, 130),
        (64, 129),
        (150000, 150),
        (777, 129),
    ],
)


# --- Pinned memory without CUDA ---


class PinRequests(TorchFunctionMode):
    """Makes each call without its pinning, and notes what should have been pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        pin = kwargs.pop("pin_memory", False)
        if func is torch.Tensor.pin_memory:
            pin, func = True, torch.Tensor.clone
        result = func(*args, **kwargs)
        if pin:
            self.storages.append(result.untyped_storage())
        return result

    def include(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(storage.data_ptr() == address for storage in self.storages)


@pytest.fixture(autouse=True)
def is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[torch.Tensor], bool]]:
    """Whether a tensor is pinned, or without CUDA, whether it was asked to be."""
    if torch.cuda.is_available():
        yield torch.Tensor.is_pinned
        return
    for _, module in BUILDERS.values():
        monkeypatch.setattr(module, "PIN_MEMORY", True, raising=False)
    with PinRequests() as requests:
        yield requests.include


# --- The strict check and a busy stream ---


@pytest.fixture
def sync_checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], Callable]:
    """Wraps a function so that the strict check reports its synchronisations."""
    if not torch.cuda.is_available():
        return lambda function: function
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    gpu_sync_debug.enable_gpu_sync_check()
    return gpu_sync_debug.with_gpu_sync_check


def delay_stream() -> torch.cuda.Event:
    """Keeps the current stream busy for about two seconds, until the event returned."""
    event = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)
    event.record()
    return event


# --- Building the builders ---


def watch_helper(
    kind: str, monkeypatch: pytest.MonkeyPatch, see: Callable[[torch.Tensor], None]
) -> None:
    """Shows the context lengths to see() whenever the builder calls the helper."""
    _, module = BUILDERS[kind]
    helper = getattr(module, HELPER)

    def watched(*, context_lens_cpu: torch.Tensor, **others: Any) -> Any:
        see(context_lens_cpu)
        return helper(context_lens_cpu=context_lens_cpu, **others)

    monkeypatch.setattr(module, HELPER, watched)


def must_be_plausible(lengths: torch.Tensor) -> None:
    """Lengths from memory that was never written could keep the helper busy forever."""
    assert lengths.min() >= 0 and lengths.max() < MAX_MODEL_LEN, "not context lengths"


class NoPrefill(MLAPrefillBackend):
    """What a builder needs of a prefill backend. The released ones need flash-attn, or
    synchronise and copy in prepare_metadata, which is not the subject here.
    """

    @staticmethod
    def get_name() -> str:
        return "NO_PREFILL"

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def run_prefill_context_chunk(
        self, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class Layer:
    """What a builder reads from its attention layer."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        dims = mla_attention.get_mla_dims(config.model_config)
        vars(self).update(vars(dims))
        self.num_heads = config.model_config.get_num_attention_heads(
            config.parallel_config
        )
        self.prefill_backend = NoPrefill(
            self.num_heads,
            1.0,
            dims.kv_lora_rank,
            dims.qk_nope_head_dim,
            dims.qk_rope_head_dim,
            dims.v_head_dim,
            config,
        )
        if config.parallel_config.decode_context_parallel_size > 1:
            self.dcp_manager = dcp.MLADCPManager(
                vllm_config=config,
                device=device,
                num_heads=self.num_heads,
                query_head_dim=dims.kv_lora_rank + dims.qk_rope_head_dim,
                output_head_dim=dims.kv_lora_rank,
                query_dtype=config.model_config.dtype,
                output_dtype=config.model_config.dtype,
                padded_num_heads=None,
                is_lse_base_on_e=True,
                use_pcp=True,  # without it, the queries are gathered too
            )


class Group:
    """What one rank sees of a decode context parallel group: its other ranks would be
    processes on other GPUs, and building metadata exchanges nothing with them.
    """

    device_group = None

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


MakeBuilder = Callable[..., Any]


@pytest.fixture
def make_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeBuilder:
    def make(
        kind: str,
        device: str,
        ranks: Ranks = Ranks(),
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 16384,
    ) -> Any:
        if ranks.dcp > 1:
            monkeypatch.setenv("VLLM_USE_DIRECT_DCP_KV_GATHER", "0")
            for module in (mla_attention, sparse_mla_attention, dcp):
                monkeypatch.setattr(module, "get_dcp_group", lambda: Group(ranks.dcp))
        if ranks.pcp > 1:
            # Only the V2 model runner has PCP. It takes Triton, but is not run here.
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
            monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
        config = make_config(
            tmp_path, device, ranks, max_num_seqs, max_num_batched_tokens
        )
        spec = MLAAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=1,
            head_size=config.model_config.get_head_size(),
            dtype=config.model_config.dtype,
        )
        watch_helper(kind, monkeypatch, must_be_plausible)
        where = torch.device(device)
        builder, _ = BUILDERS[kind]
        with set_current_vllm_config(config):
            layers = config.compilation_config.static_forward_context
            layers["layer"] = Layer(config, where)
            return builder(spec, ["layer"], config, where)

    return make


def make_config(
    folder: Path,
    device: str,
    ranks: Ranks,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        parallel_config=ParallelConfig(
            prefill_context_parallel_size=ranks.pcp,
            distributed_executor_backend="mp" if ranks.pcp > 1 else None,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig(device),
    )
    # Afterwards: VllmConfig would look for compiled operators to fuse across ranks.
    parallel = config.parallel_config
    parallel.tensor_parallel_size = ranks.tp
    parallel.decode_context_parallel_size = ranks.dcp
    parallel.cp_kv_cache_interleave_size = ranks.interleave
    return config


def make_metadata(
    batch: Batch, device: str, dtype: torch.dtype, ranks: Ranks = Ranks()
) -> CommonAttentionMetadata:
    """The batch as the model runner describes it; dtype is that of the host lengths."""
    requests = [(9 + i, 1) for i in range(batch.decodes)] + batch.prefills
    queries = [query for _, query in requests]
    seq_lens = [context + query for context, query in requests]
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    metadata = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(device),
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=dtype),
        dcp_local_seq_lens=torch.tensor(
            [on_rank(0, length, ranks) for length in seq_lens], dtype=torch.int32
        ).to(device),
        num_reqs=len(requests),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(len(requests), 1, dtype=torch.int32).to(device),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64).to(device),
        is_prefilling=torch.arange(len(requests)) >= batch.decodes,
    )
    if device == "cpu":
        # Mapping tokens to requests takes a Triton kernel in some releases.
        metadata._token_to_req_indices_cache = torch.repeat_interleave(
            torch.arange(len(requests), dtype=torch.int32), torch.tensor(queries)
        ).to(torch.int32)
    return metadata


# --- What must come out ---


def on_rank(rank: int, tokens: int, ranks: Ranks) -> int:
    """How many of a sequence's tokens are in the KV cache of a rank."""
    round_of_all = ranks.interleave * ranks.dcp
    rest = tokens % round_of_all - rank * ranks.interleave
    return tokens // round_of_all * ranks.interleave + min(
        max(rest, 0), ranks.interleave
    )


def rows(tokens: int, ranks: Ranks) -> int:
    """The rows a context takes in the workspace: those of the fullest rank, in whole
    interleaving blocks when there are several.
    """
    if ranks.dcp == 1:
        return tokens
    return -(-tokens // (ranks.interleave * ranks.dcp)) * ranks.interleave


def split_into_chunks(
    contexts: list[int], workspace: int, step: int, ranks: Ranks
) -> list[list[tuple[int, int, int]]]:
    """Fills the workspace again and again; pieces are (prefill, start, length).

    A context that does not fit is cut after a multiple of step tokens. A prefill
    without context ends a chunk.
    """
    capacity = workspace // ranks.dcp
    chunks: list[list[tuple[int, int, int]]] = [[]]
    used = 0
    for prefill, context in enumerate(contexts):
        start = 0
        if context == 0:
            chunks.append([])
            used = 0
        while start < context:
            room = capacity - used + rows(start, ranks)
            length = context - start
            if rows(context, ranks) > room:
                longest = min(workspace // step * step, (length - 1) // step * step)
                fitting = (
                    cut
                    for cut in range(longest, 0, -step)
                    if rows(start + cut, ranks) <= room
                )
                length = next(fitting, 0)
            if length:
                chunks[-1].append((prefill, start, length))
                used += rows(start + length, ranks) - rows(start, ranks)
                start += length
            if start < context:
                chunks.append([])
                used = 0
    return [chunk for chunk in chunks if chunk]


def expected_chunk(
    pieces: list[tuple[int, int, int]], batch: Batch, ranks: Ranks
) -> dict[str, Any]:
    queries = [query for _, query in batch.prefills]
    first, last = pieces[0][0], pieces[-1][0] + 1
    lengths = [length for _, _, length in pieces]
    local_starts = [rows(start, ranks) for _, start, _ in pieces]
    local = [
        rows(start + length, ranks) - rows(start, ranks) for _, start, length in pieces
    ]
    fields = {
        "request_slice": slice(first, last),
        "token_slice": slice(sum(queries[:first]), sum(queries[:last])),
        "continuation_token_end": sum(queries[: first + 1]),
        "is_continuation": pieces[0][1] > 0,
        "num_context_tokens": sum(lengths),
        "num_local_context_tokens": sum(local),
        "max_query_len": max(queries[first:last]),
        "max_seq_len": max(lengths),
        "seq_lens": lengths,
        "starts": local_starts,
        "cu_seq_lens": [0, *itertools.accumulate(lengths)],
        "query_start_loc": [0, *itertools.accumulate(queries[first:last])],
        "token_to_seq": numbered(lengths),
    }
    if ranks.dcp > 1:
        fields |= {
            "local_starts": local_starts,
            "padded_local_seq_lens": local,
            "padded_local_cu_seq_lens": [0, *itertools.accumulate(local)],
            "padded_local_token_to_seq": numbered(local),
            "local_context_lens_allranks": [
                [on_rank(rank, batch.contexts[i], ranks) for rank in range(ranks.dcp)]
                for i in range(first, last)
            ],
        }
    return fields


def numbered(lengths: list[int]) -> list[int]:
    return [i for i, length in enumerate(lengths) for _ in range(length)]


def as_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def check_context(
    context: Any, batch: Batch, builder: Any, kind: str, ranks: Ranks = Ranks()
) -> None:
    """Compares what the builder made of a batch with what must come out."""
    lengths = context.context_lens
    assert lengths.device.type == builder.device.type
    assert lengths.tolist() == batch.contexts
    assert context.context_lens_list == batch.contexts

    ends = list(itertools.accumulate(query for _, query in batch.prefills))
    assert context.empty_token_slices == [
        slice(end - query, end)
        for end, (length, query) in zip(ends, batch.prefills, strict=True)
        if length == 0
    ]
    # Sparse MLA cuts contexts at block boundaries only where its kernels need it.
    step = BLOCK_SIZE if kind == "dense" or current_platform.is_cuda() else 1
    if ranks.dcp > 1:
        step = math.lcm(step, ranks.interleave * ranks.dcp)
    expected = [
        expected_chunk(pieces, batch, ranks)
        for pieces in split_into_chunks(
            batch.contexts, builder.chunked_prefill_workspace_size, step, ranks
        )
    ]
    for index, (chunk, fields) in enumerate(zip(context.chunks, expected, strict=True)):
        assert chunk.index == index
        got = {name: as_plain(getattr(chunk, name)) for name in fields}
        assert got == fields


# --- Tests ---


@on_devices
@both_builders
@both_dtypes
def test_pinned_lengths_reach_the_helper(
    kind: str,
    device: str,
    dtype: torch.dtype,
    make_builder: MakeBuilder,
    is_pinned: Callable[[torch.Tensor], bool],
    sync_checked: Callable[[Callable], Callable],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails unpatched: the builder hands over the pageable result of a subtraction."""
    builder = make_builder(kind, device)
    handed: list[torch.Tensor] = []
    watch_helper(kind, monkeypatch, handed.append)
    sync_checked(builder.build)(0, make_metadata(MIXED, device, dtype))
    (lengths,) = handed
    assert lengths.tolist() == MIXED.contexts
    assert is_pinned(lengths), "the lengths are copied from pageable memory"


@gpu
@both_builders
@both_dtypes
def test_pinned_build_does_not_wait_for_the_gpu(
    kind: str,
    dtype: torch.dtype,
    make_builder: MakeBuilder,
    sync_checked: Callable[[Callable], Callable],
) -> None:
    """Fails unpatched: the third pageable copy above 64 KiB that is in flight returns
    when the stream is there, and then the event has passed.
    """
    prefills = 20000  # 80 KB of lengths in int32
    tokens = prefills * 129
    builder = make_builder(
        kind, "cuda", max_num_seqs=prefills, max_num_batched_tokens=tokens
    )
    query = builder.reorder_batch_threshold + 1
    batch = Batch(0, [(1 + i % 2, query) for i in range(prefills)])
    metadata = make_metadata(batch, "cuda", dtype)
    build = sync_checked(builder.build)
    # The first time round fills the caching allocators.
    for warm in (False, True):
        torch.cuda.synchronize()
        event = delay_stream()
        built = [build(0, metadata) for _ in range(4)]
        if warm:
            assert not event.query(), "the builds waited for the GPU"
        torch.cuda.synchronize()
    for each in built:
        assert each.prefill.chunked_context.context_lens.tolist() == batch.contexts


@on_devices
@both_builders
@both_dtypes
@pytest.mark.parametrize("ranks", ALL_RANKS, ids=str)
def test_mixed_batch(
    kind: str,
    device: str,
    dtype: torch.dtype,
    ranks: Ranks,
    make_builder: MakeBuilder,
    sync_checked: Callable[[Callable], Callable],
) -> None:
    builder = make_builder(kind, device, ranks)
    build = sync_checked(builder.build)
    built = build(0, make_metadata(MIXED, device, dtype, ranks))
    assert (built.num_decodes, built.num_prefills) == (3, len(MIXED.prefills))
    check_context(built.prefill.chunked_context, MIXED, builder, kind, ranks)


@on_devices
@both_builders
def test_prefill_context_parallel_has_short_prefills(
    kind: str,
    device: str,
    make_builder: MakeBuilder,
    sync_checked: Callable[[Callable], Callable],
) -> None:
    """With PCP a rank's share of a prefill may be a single token, and no decode."""
    ranks = Ranks(pcp=2)
    batch = Batch(2, [(300, 1), (0, 1), (77, 2), (4000, 129)])
    builder = make_builder(kind, device, ranks)
    build = sync_checked(builder.build)
    built = build(0, make_metadata(batch, device, torch.int32, ranks))
    assert (built.num_decodes, built.num_prefills) == (2, 4)
    check_context(built.prefill.chunked_context, batch, builder, kind, ranks)


@on_devices
@both_builders
@both_dtypes
@pytest.mark.parametrize("prefills", [1, 16], ids=["one", "max_num_seqs"])
def test_prefills_only(
    kind: str,
    device: str,
    dtype: torch.dtype,
    prefills: int,
    make_builder: MakeBuilder,
    sync_checked: Callable[[Callable], Callable],
) -> None:
    batch = Batch(0, [(5000 + 61 * i, 129 + i) for i in range(prefills)])
    builder = make_builder(kind, device, max_num_seqs=16)
    built = sync_checked(builder.build)(0, make_metadata(batch, device, dtype))
    assert (built.num_decodes, built.num_prefills) == (0, prefills)
    check_context(built.prefill.chunked_context, batch, builder, kind)


@on_devices
@both_builders
def test_nothing_to_gather(
    kind: str,
    device: str,
    make_builder: MakeBuilder,
    sync_checked: Callable[[Callable], Callable],
) -> None:
    builder = make_builder(kind, device)
    build = sync_checked(builder.build)
    decodes = build(0, make_metadata(Batch(4, []), device, torch.int32))
    assert decodes.num_decodes == 4
    assert decodes.prefill is None
    without = Batch(2, [(0, 129), (0, 300)])
    fresh = build(0, make_metadata(without, device, torch.int32))
    assert fresh.num_prefills == 2
    assert fresh.prefill.chunked_context is None


@on_devices
@both_builders
@both_dtypes
def test_builds_in_flight_keep_their_lengths(
    kind: str,
    device: str,
    dtype: torch.dtype,
    make_builder: MakeBuilder,
    sync_checked: Callable[[Callable], Callable],
) -> None:
    """No build's lengths turn up in another's while all their copies are pending.

    Passes on pageable memory too; fails where the builder reuses pinned memory that a
    copy still reads.
    """
    builder = make_builder(kind, device)
    batches = [
        Batch(i % 3, [(1 + 100 * i + 7 * j, 129 + j) for j in range(13 - i % 2)])
        for i in range(16)
    ]
    build = sync_checked(builder.build)

    def build_all() -> bool:
        """Builds and compares, and says whether the GPU was behind all the time."""
        inputs = [make_metadata(batch, device, dtype) for batch in batches]
        event = None
        if device == "cuda":
            torch.cuda.synchronize()
            event = delay_stream()
        contexts = [build(0, each).prefill.chunked_context for each in inputs]
        behind = event is None or not event.query()
        for context, batch in zip(contexts, batches, strict=True):
            check_context(context, batch, builder, kind)
        return behind

    build_all()  # fills the caching allocators
    assert build_all(), "the builds waited for the GPU"


@gpu
def test_strict_check_is_on(sync_checked: Callable[[Callable], Callable]) -> None:
    """What the other tests rely on: the check reports what it can see."""
    on_gpu = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="GPU<->CPU sync detected"):
        sync_checked(on_gpu.item)()
    if hasattr(gpu_sync_debug, "IMPLICIT_SYNC_ERROR_MESSAGE"):
        pageable = torch.ones(1)
        copy = sync_checked(lambda: pageable.to("cuda", non_blocking=True))
        with pytest.raises(RuntimeError, match="the CPU tensor is not pinned"):
            copy()
