# SPDX-License-Identifier: Apache-2.0
"""Each edit on small snippets of ours: the fault, its cured forms, near misses.

The snippets have the names that a rule looks for and nothing else of vLLM.
"""

import textwrap
from dataclasses import dataclass

import pytest

from vllm_pinned.edits import Edit, edits_folder, load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.imports import parse
from vllm_pinned.survey import Read, State, changes, survey

TORCH_UTILS = {
    "vllm/utils/torch_utils.py": "PIN_MEMORY = True\nasync_tensor_h2d = print\n"
}
EDITS = {edit.id: edit for edit in load_edits()}


def look(edit: str, source: str, others: dict[str, str] | None = None) -> State:
    """The state of `edit` where its file is `source`."""
    (finding,) = survey(reader(edit, source, others), [EDITS[edit]])
    return finding.state


def made(edit: str, source: str) -> str:
    """`source` with `edit` made."""
    read = reader(edit, source)
    new = changes(read, survey(read, [EDITS[edit]]))
    return new[EDITS[edit].path].decode()


def reader(edit: str, source: str, others: dict[str, str] | None = None) -> Read:
    tree = {**TORCH_UTILS, **(others or {}), EDITS[edit].path: textwrap.dedent(source)}
    line, module = EDITS[edit].import_line, EDITS[edit].module
    if line and module and parse(line)[0] in source:  # the edit was made
        tree[module] = (EDITS[edit].own(module) or b"").decode()
    return lambda path: tree[path].encode() if path in tree else None


@dataclass(frozen=True)
class Case:
    """Sources for one edit; `near` maps a replacement in `fault` to its reason."""

    edit: str
    fault: str
    cured: str
    near: dict[tuple[str, str], str]


# Two proposers have the same method.
BACKUP_TOKENS = """\
    import torch
    from vllm.v1.utils import CpuGpuBuffer


    class Proposer:
        def __init__(self, max_num_seqs, device):
            self.device = device
            self.backup_next_token_ids = CpuGpuBuffer(
                max_num_seqs, device=device, dtype=torch.int32
            )

        def prepare_next_token_ids_padded(self, requests, batch):
            count = batch.num_reqs
            for i in range(count):
                request = requests[batch.req_ids[i]]
                last = batch.num_tokens[i] - 1
                self.backup_next_token_ids.np[i] = request.get_token_id(last)
            self.backup_next_token_ids.copy_to_gpu(count)
            return self.backup_next_token_ids.gpu
    """
OWN_BACKUP_TOKENS = BACKUP_TOKENS.replace(
    """\
            for i in range(count):
""",
    """\
            # A fresh buffer: the last call's copy may still have to read the previous one.
            self.backup_next_token_ids = CpuGpuBuffer(
                count, dtype=torch.int32, device=self.device
            )
            for i in range(count):
""",
)

CASES = [
    Case(
        "eplb-gloo-receive-staging",
        fault="""\
            import torch


            class TorchDistGlooStagedEplbCommunicator:
                def execute(self, ops, stream):
                    landing = []
                    for op, tensor in ops:
                        if op == "send":
                            tensor.to(device="cpu", non_blocking=True)
                            continue
                        host = torch.empty_like(tensor, device="cpu")
                        landing.append((tensor, host))
                    with torch.cuda.stream(stream):
                        for tensor, host in landing:
                            tensor.copy_(host, non_blocking=True)
            """,
        cured="""\
            import torch

            from vllm.utils.torch_utils import PIN_MEMORY


            class TorchDistGlooStagedEplbCommunicator:
                def execute(self, ops, stream):
                    landing = []
                    for op, tensor in ops:
                        if op == "send":
                            tensor.to(device="cpu", non_blocking=True)
                            continue
                        host = torch.empty_like(
                            tensor, device="cpu", pin_memory=PIN_MEMORY
                        )
                        landing.append((tensor, host))
                    with torch.cuda.stream(stream):
                        for tensor, host in landing:
                            tensor.copy_(host, non_blocking=True)
            """,
        near={
            ("host, non_blocking=True", "host"): "the copy is synchronous",
            ("host, non_blocking=True", "host, non_blocking=False"): "synchronous",
            ('torch.empty_like(tensor, device="cpu")', "torch.empty_like(tensor)"): (
                "staged on the GPU"
            ),
            ('(tensor, device="cpu")', '(tensor, device="meta")'): "no host memory",
            ('device="cpu")', 'device="cpu", pin_memory=False)'): "pinning refused",
            ("empty_like(tensor, device", "zeros_like(tensor, device"): "another call",
            ("def execute", "def run"): "another method",
            ("class TorchDistGlooStaged", "class TorchDistNccl"): "another class",
            (
                "landing.append((tensor, host))",
                'landing.append((tensor, torch.empty_like(host, device="cpu")))',
            ): "twice",
        },
    ),
    Case(
        "sparse-mla-context-lens",
        fault="""\
            import torch
            from vllm.utils.torch_utils import async_tensor_h2d


            class SparseMLACommonMetadataBuilder:
                def _build_chunked_context_fields(
                    self, common, num_decodes, num_prefills, query_lens
                ):
                    seq_lens = common.seq_lens_cpu_upper_bound
                    context_lens = (
                        seq_lens[num_decodes : num_decodes + num_prefills] - query_lens
                    )
                    return build_mla_chunked_context_metadata(
                        context_lens_cpu=context_lens,
                        device=self.device,
                    )
            """,
        cured="""\
            import torch
            from vllm.utils.torch_utils import PIN_MEMORY, async_tensor_h2d


            class SparseMLACommonMetadataBuilder:
                def _build_chunked_context_fields(
                    self, common, num_decodes, num_prefills, query_lens
                ):
                    seq_lens = common.seq_lens_cpu_upper_bound
                    context_lens = torch.empty(
                        num_prefills, dtype=seq_lens.dtype, pin_memory=PIN_MEMORY
                    )
                    torch.subtract(
                        seq_lens[num_decodes : num_decodes + num_prefills],
                        query_lens,
                        out=context_lens,
                    )
                    return build_mla_chunked_context_metadata(
                        context_lens_cpu=context_lens,
                        device=self.device,
                    )
            """,
        near={
            ("] - query_lens", "] + query_lens"): "not the context lengths",
            ("common.seq_lens_cpu_upper_bound", "common.seq_lens"): "on the GPU",
            ("context_lens_cpu=context_lens", "context_lens_cpu=None"): "not consumed",
            ("build_mla_chunked_context_metadata", "print"): "another consumer",
            ("num_decodes + num_prefills", "num_prefills"): "how many is not told",
            ("SparseMLACommonMetadataBuilder", "Builder"): "another class",
        },
    ),
    Case(
        "dense-mla-context-lens",
        fault="""\
            import torch
            from vllm.utils.torch_utils import (
                LayerNameType,
                async_tensor_h2d,
            )


            class MLACommonMetadataBuilder:
                def build(self, common, num_reqs):
                    num_decodes, num_prefills = self.split(common)
                    assert num_decodes + num_prefills == num_reqs
                    if num_prefills > 0:
                        start = num_decodes
                        seq_lens = common.seq_lens_cpu_upper_bound
                        query_lens = self.query_lens(common)
                        context_lens = seq_lens[start:num_reqs] - query_lens
                        build_mla_chunked_context_metadata(
                            context_lens_cpu=context_lens, device=self.device
                        )
            """,
        cured="""\
            import torch
            from vllm.utils.torch_utils import (
                PIN_MEMORY,
                LayerNameType,
                async_tensor_h2d,
            )


            class MLACommonMetadataBuilder:
                def build(self, common, num_reqs):
                    num_decodes, num_prefills = self.split(common)
                    assert num_decodes + num_prefills == num_reqs
                    if num_prefills > 0:
                        start = num_decodes
                        seq_lens = common.seq_lens_cpu_upper_bound
                        query_lens = self.query_lens(common)
                        context_lens = torch.empty(
                            num_prefills, dtype=seq_lens.dtype, pin_memory=PIN_MEMORY
                        )
                        torch.subtract(
                            seq_lens[start:num_reqs],
                            query_lens,
                            out=context_lens,
                        )
                        build_mla_chunked_context_metadata(
                            context_lens_cpu=context_lens, device=self.device
                        )
            """,
        near={
            ("] - query_lens", "] * query_lens"): "not the context lengths",
            ("common.seq_lens_cpu_upper_bound", "common.seq_lens"): "on the GPU",
            ("assert num_decodes + num_prefills == num_reqs", "pass"): "how many?",
            ("start = num_decodes", "start = 0"): "not the prefills",
            ("seq_lens[start:num_reqs]", "seq_lens[start:]"): "how many is not told",
            ("context_lens_cpu=context_lens,", ""): "not consumed",
            ("def build", "def rebuild"): "another method",
        },
    ),
    Case(
        "sm90-sparse-mla-plan",
        fault="""\
            import torch
            from vllm.triton_utils import tl, triton
            from vllm.v1.kv_cache_interface import AttentionSpec


            class _SM90State:
                def __init__(self, n):
                    self._qo_cpu = torch.empty(n + 1)
                    self._kv_cpu = torch.empty(n + 1)
                    self._lens_cpu = torch.full((n,), 1)

                def _plan(self, n):
                    self._qo_cpu.fill_(n)
                    self.wrapper.plan(
                        self._qo_cpu,
                        self._kv_cpu,
                        self.kv_indices[: int(self._kv_cpu[-1])],
                        self._lens_cpu,
                        self.num_heads,  # heads
                        1,
                        causal=False,
                    )
            """,
        cured="""\
            import torch
            from vllm.triton_utils import tl, triton
            from vllm.utils.torch_utils import PIN_MEMORY
            from vllm.v1.kv_cache_interface import AttentionSpec


            class _SM90State:
                def __init__(self, n):
                    self._qo_cpu = torch.empty(n + 1)
                    self._kv_cpu = torch.empty(n + 1)
                    self._lens_cpu = torch.full((n,), 1)

                def _plan(self, n):
                    self._qo_cpu.fill_(n)
                    # plan() copies these to the GPU asynchronously, so it gets pinned copies of
                    # this call's own. The buffers stay pageable: pin_memory() returns a pinned
                    # tensor as it is, and the next plan would rewrite it under the copy.
                    qo_cpu, kv_cpu, lens_cpu = (
                        buffer.pin_memory() if PIN_MEMORY else buffer
                        for buffer in (self._qo_cpu, self._kv_cpu, self._lens_cpu)
                    )
                    self.wrapper.plan(
                        qo_cpu,
                        kv_cpu,
                        self.kv_indices[: int(self._kv_cpu[-1])],
                        lens_cpu,
                        self.num_heads,  # heads
                        1,
                        causal=False,
                    )
            """,
        near={
            ("torch.empty(n + 1)", "torch.empty(n + 1, pin_memory=PIN_MEMORY)"): (
                "pinned and reused: its own pin_memory() would copy nothing"
            ),
            ("torch.full((n,), 1)", "torch.full((n,), 1).pin_memory()"): "the same",
            (
                "            self._qo_cpu,\n",
                "            self._qo_cpu.pin_memory(),\n",
            ): "one of three",
            ("            self._lens_cpu,\n", "            self._lens,\n"): "another",
            ("self.wrapper.plan(", "self.wrapper.begin("): "another call",
            ("class _SM90State", "class _SM100State"): "another class",
            ("class _SM90State", "class _SM90State2"): "another class",
        },
    ),
    Case(
        "flashinfer-dcp-prefill-plan",
        fault="""\
            import torch
            from vllm.utils.flashinfer import can_use
            from vllm.utils.torch_utils import PIN_MEMORY


            class BatchDCPPrefillWrapper:
                def plan(self, indptr, causal):
                    self._context.plan(
                        qo_indptr=indptr,
                        causal=False,  # context
                    )
                    self._new_tokens.plan(qo_indptr=indptr, causal=causal)

                def run(self, query):
                    return self._context.run(query), self._new_tokens.run(query)
            """,
        cured="""\
            import torch
            from vllm.utils.flashinfer import can_use
            from vllm.utils.flashinfer_plan_guard import plan_guard
            from vllm.utils.torch_utils import PIN_MEMORY


            class BatchDCPPrefillWrapper:
                def plan(self, indptr, causal):
                    with plan_guard(self._context):
                        self._context.plan(
                            qo_indptr=indptr,
                            causal=False,  # context
                        )
                    with plan_guard(self._new_tokens):
                        self._new_tokens.plan(qo_indptr=indptr, causal=causal)

                def run(self, query):
                    return self._context.run(query), self._new_tokens.run(query)
            """,
        near={
            ("self._new_tokens.plan", "self._new_tokens.begin"): "one plan of two",
            ("self._context.plan(", "self._native.plan("): "another wrapper",
            ("self._new_tokens.plan", "x = self._new_tokens.plan"): "no statement",
            ("def plan", "def prepare"): "another method",
            ("class BatchDCPPrefillWrapper", "class BatchPrefillWrapper"): "not this",
        },
    ),
    Case(
        "flashinfer-prefill-plan",
        fault="""\
            import torch
            from vllm.v1.kv_cache_interface import AttentionSpec


            class FlashInferMetadataBuilder:
                def build(self, prefix, common):
                    wrapper = self._get_prefill_wrapper()
                    if self.use_dcp:
                        wrapper.plan(qo_indptr_cpu=common.starts, head_dim=128)
                    else:
                        wrapper.plan(
                            qo_indptr=common.starts,
                            head_dim_qk=128,
                        )
                    return wrapper
            """,
        cured="""\
            import torch
            from vllm.utils.flashinfer_plan_guard import plan_guard
            from vllm.v1.kv_cache_interface import AttentionSpec


            class FlashInferMetadataBuilder:
                def build(self, prefix, common):
                    wrapper = self._get_prefill_wrapper()
                    if self.use_dcp:
                        wrapper.plan(qo_indptr_cpu=common.starts, head_dim=128)
                    else:
                        with plan_guard(wrapper):
                            wrapper.plan(
                                qo_indptr=common.starts,
                                head_dim_qk=128,
                            )
                    return wrapper
            """,
        near={
            ("head_dim_qk=128", "head_dim=128"): "the other wrapper's plan",
            ("head_dim=128", "head_dim_qk=128"): "twice",
            (
                "wrapper.plan(\n                qo_indptr",
                "self.w.plan(\n                qo_indptr",
            ): "which wrapper?",
            (
                "wrapper.plan(\n                qo_indptr",
                "begin(\n                qo_indptr",
            ): "another call",
            ("def build", "def rebuild"): "another method",
            ("class FlashInferMetadataBuilder", "class MetadataBuilder"): "not this",
        },
    ),
    Case(
        "flashinfer-cascade-plan",
        fault="""\
            import torch
            from vllm.v1.kv_cache_interface import AttentionSpec


            class FlashInferMetadataBuilder:
                def build(self, prefix, common):
                    if prefix > 0:
                        metadata.cascade_wrapper = self._get_cascade_wrapper()
                        metadata.cascade_wrapper.plan(
                            [common.shared, common.starts],
                            head_dim=128,
                        )
                    return metadata
            """,
        cured="""\
            import torch
            from vllm.utils.flashinfer_plan_guard import plan_guard
            from vllm.v1.kv_cache_interface import AttentionSpec


            class FlashInferMetadataBuilder:
                def build(self, prefix, common):
                    if prefix > 0:
                        metadata.cascade_wrapper = self._get_cascade_wrapper()
                        with plan_guard(metadata.cascade_wrapper):
                            metadata.cascade_wrapper.plan(
                                [common.shared, common.starts],
                                head_dim=128,
                            )
                    return metadata
            """,
        near={
            ("cascade_wrapper.plan(", "cascade_wrapper.begin("): "another call",
            ("metadata.cascade_wrapper.plan", "self.wrapper.plan"): "another wrapper",
            (
                "    return metadata",
                "    self.cascade_wrapper.plan()\n        return metadata",
            ): "twice",
            ("def build", "def rebuild"): "another method",
            ("class FlashInferMetadataBuilder", "class MetadataBuilder"): "not this",
        },
    ),
    Case(
        "flashinfer-decode-plan",
        fault="""\
            import torch
            from flashinfer.decode import fast_decode_plan
            from vllm.v1.kv_cache_interface import AttentionSpec


            def fast_plan_decode(self, indptr, indices):
                if getattr(self, "first", True):
                    self.plan(
                        indptr=indptr,
                        indices=indices,
                    )
                    self.first = False
                    return

                fast_decode_plan(
                    self,
                    indptr=indptr,
                    indices=indices,
                )
            """,
        cured="""\
            import torch
            from flashinfer.decode import fast_decode_plan
            from vllm.utils.flashinfer_plan_guard import plan_guard
            from vllm.v1.kv_cache_interface import AttentionSpec


            def fast_plan_decode(self, indptr, indices):
                if getattr(self, "first", True):
                    with plan_guard(self):
                        self.plan(
                            indptr=indptr,
                            indices=indices,
                        )
                    self.first = False
                    return

                with plan_guard(self):
                    fast_decode_plan(
                        self,
                        indptr=indptr,
                        indices=indices,
                    )
            """,
        near={
            ("    self.plan(", "    self.begin("): "one plan of two",
            ("    fast_decode_plan(", "    decode_plan("): "another function",
            (
                "    fast_decode_plan(\n",
                "    return fast_decode_plan(\n",
            ): "no statement",
            ("def fast_plan_decode", "def plan_decode"): "another function",
            (
                "        self.first = False",
                "        self.plan(indptr=indptr)\n        self.first = False",
            ): "three times",
        },
    ),
    Case(
        "sm90-sparse-mla-plan-guard",
        fault="""\
            import torch
            from vllm.utils.torch_utils import PIN_MEMORY
            from vllm.v1.kv_cache_interface import AttentionSpec


            class _SM90State:
                def _plan(self, n):
                    self.wrapper.plan(
                        self._qo_cpu,
                        self.num_heads,  # heads
                    )
            """,
        cured="""\
            import torch
            from vllm.utils.flashinfer_plan_guard import plan_guard
            from vllm.utils.torch_utils import PIN_MEMORY
            from vllm.v1.kv_cache_interface import AttentionSpec


            class _SM90State:
                def _plan(self, n):
                    with plan_guard(self.wrapper):
                        self.wrapper.plan(
                            self._qo_cpu,
                            self.num_heads,  # heads
                        )
            """,
        near={
            ("self.wrapper.plan(", "self.wrapper.begin("): "another call",
            ("self.wrapper.plan(", "self.wrappers.plan("): "another wrapper",
            ("class _SM90State", "class _SM100State"): "another class",
        },
    ),
    Case(
        "step5-prefill-chunks",
        fault="""\
            import torch
            from vllm.triton_utils import tl, triton


            class PrefillChunk:
                pass


            def make_prefill_chunks(offsets, device):
                for first in range(0, len(offsets), 32):
                    last = min(first + 32, len(offsets))
                    # of this chunk
                    local = offsets[first : last + 1] - offsets[first]
                    yield PrefillChunk(
                        torch.arange(last - first + 1, dtype=torch.int32, device="cpu"),
                        local,
                    )
            """,
        cured="""\
            import torch
            from vllm.triton_utils import tl, triton
            from vllm.utils.torch_utils import PIN_MEMORY


            class PrefillChunk:
                pass


            def make_prefill_chunks(offsets, device):
                for first in range(0, len(offsets), 32):
                    last = min(first + 32, len(offsets))
                    # of this chunk
                    local = torch.empty_like(offsets[first : last + 1], pin_memory=PIN_MEMORY)
                    torch.subtract(offsets[first : last + 1], offsets[first], out=local)
                    yield PrefillChunk(
                        torch.arange(
                            last - first + 1,
                            dtype=torch.int32,
                            device="cpu",
                            pin_memory=PIN_MEMORY,
                        ),
                        local,
                    )
            """,
        near={
            (', device="cpu")', ', device="cpu").pin_memory()'): "one of two",
            ("] - offsets[first]", "] + offsets[first]"): "another value",
            ("            local,\n", "            offsets,\n"): "not handed over",
            ("yield PrefillChunk(", "yield dict("): "handed to something else",
            ("def make_prefill_chunks", "def make_chunks"): "another function",
        },
    ),
    Case(
        "step5-prefill-plan",
        fault="""\
            import torch
            from vllm.config import get_config


            class Step5FlashInferSparse:
                def run_attention(self, query, out, prefill_chunks):
                    for chunk in prefill_chunks:
                        keys = gather(chunk)
                        # not in flight
                        self._planned.synchronize()
                        self._attention.plan(
                            chunk.offsets,
                            causal=False,  # all keys are earlier
                        )
                        self._planned.record(torch.cuda.current_stream())
                        self._attention.run(query, keys)
                    return out
            """,
        cured="""\
            import torch
            from vllm.config import get_config
            from vllm.utils.flashinfer_plan_guard import plan_guard


            class Step5FlashInferSparse:
                def run_attention(self, query, out, prefill_chunks):
                    for chunk in prefill_chunks:
                        keys = gather(chunk)
                        # not in flight
                        with plan_guard(self._attention):
                            self._attention.plan(
                                chunk.offsets,
                                causal=False,  # all keys are earlier
                            )
                        self._attention.run(query, keys)
                    return out
            """,
        near={
            ("self._planned.synchronize()", "pass"): "it does not wait",
            ("self._planned.record(", "self._other.record("): "of another event",
            ("self._attention.plan(", "self._attention.begin("): "another call",
            ("self._attention.plan(", "self._paged.plan("): "another wrapper",
            ("def run_attention", "def run"): "another method",
            ("class Step5FlashInferSparse", "class Step5"): "another class",
            (
                "            self._planned.record(torch.cuda.current_stream())\n",
                "",
            ): "the event of what?",
        },
    ),
    Case(
        "h2d-race-check",
        fault="""\
            import torch
            from vllm.utils.gpu_sync_debug import enable_gpu_sync_check
            from vllm.utils.mem_utils import MemorySnapshot


            class Worker:
                def init_device(self, index):
                    if self.device_type == "cuda":
                        self.device = torch.device("cuda", index)
                        torch.accelerator.set_device_index(self.device)

                        # Before the memory is measured.
                        init_worker_distributed_environment(
                            self.vllm_config, self.rank
                        )
            """,
        cured="""\
            import torch
            from vllm.utils.gpu_sync_debug import enable_gpu_sync_check
            from vllm.utils.h2d_race_check import install_h2d_race_check
            from vllm.utils.mem_utils import MemorySnapshot


            class Worker:
                def init_device(self, index):
                    if self.device_type == "cuda":
                        self.device = torch.device("cuda", index)
                        torch.accelerator.set_device_index(self.device)
                        install_h2d_race_check()

                        # Before the memory is measured.
                        init_worker_distributed_environment(
                            self.vllm_config, self.rank
                        )
            """,
        near={
            ("index(self.device)", "index(0)"): "another device",
            ("accelerator.set_device_index", "accelerator.device_index"): "not set",
            ("init_worker_distributed_environment", "init"): "when is it used?",
            ("def init_device", "def load_model"): "another method",
            ("class Worker", "class XPUWorker"): "another class",
            (
                "self.device = torch.device",
                "install_h2d_race_check()\n            self.device = torch.device",
            ): "before the device is set",
        },
    ),
    Case(
        "h2d-race-check-variables",
        fault="""\
            import os
            from collections.abc import Callable
            from typing import Any


            environment_variables: dict[str, Callable[[], Any]] = {
                "VLLM_GPU_SYNC_CHECK": choice("VLLM_GPU_SYNC_CHECK", ["warn", "error"]),
                # Another one.
                "VLLM_OTHER": lambda: os.getenv("VLLM_OTHER"),
            }
            """,
        cured="""\
            import os
            from collections.abc import Callable
            from typing import Any


            environment_variables: dict[str, Callable[[], Any]] = {
                "VLLM_GPU_SYNC_CHECK": choice("VLLM_GPU_SYNC_CHECK", ["warn", "error"]),
                # Report host memory that is rewritten while an asynchronous copy still reads it:
                # "warn" or "error". Unset, nothing is checked. See vllm/utils/h2d_race_check.py.
                "VLLM_H2D_RACE_CHECK": lambda: os.getenv("VLLM_H2D_RACE_CHECK"),
                # Microseconds by which that check delays the stream of each copy.
                "VLLM_H2D_RACE_LAG_US": lambda: os.getenv("VLLM_H2D_RACE_LAG_US"),
                # Another one.
                "VLLM_OTHER": lambda: os.getenv("VLLM_OTHER"),
            }
            """,
        near={
            ('"VLLM_GPU_SYNC_CHECK": ', '"VLLM_SYNC_CHECK": '): "another variable",
            ("environment_variables:", "variables:"): "another dictionary",
            ('"VLLM_OTHER": ', '"VLLM_H2D_RACE_CHECK": '): "one of the two",
        },
    ),
    Case(
        "flash-attn-mm-prefix-ranges",
        fault="""\
            import torch
            from vllm.v1.attention.backend import AttentionBackend


            class FlashAttentionMetadataBuilder:
                def __init__(self, n):
                    self.host = torch.empty((n, 2), pin_memory=PIN_MEMORY)
                    self.device = torch.empty((n, 2), device="cuda")

                def build(self, batch):
                    count = fill(self.host.numpy(), batch)
                    ranges = self.device[:count]
                    ranges.copy_(
                        self.host[:count],
                        non_blocking=True,
                    )
                    return ranges
            """,
        cured="""\
            import torch
            from vllm.utils.torch_utils import PIN_MEMORY
            from vllm.v1.attention.backend import AttentionBackend


            class FlashAttentionMetadataBuilder:
                def __init__(self, n):
                    self.host = torch.empty((n, 2), pin_memory=PIN_MEMORY)
                    self.device = torch.empty((n, 2), device="cuda")

                def build(self, batch):
                    count = fill(self.host.numpy(), batch)
                    ranges = self.device[:count]
                    # The next build refills the buffer while this copy may still have to
                    # read it, so the copy reads a pinned tensor of its own.
                    staged = self.host[:count]
                    pinned = torch.empty_like(staged, pin_memory=PIN_MEMORY).copy_(staged)
                    ranges.copy_(pinned, non_blocking=True)
                    return ranges
            """,
        near={
            ("            non_blocking=True,\n", ""): "the copy is synchronous",
            ("self.host[:count]", "self.other[:count]"): "another buffer",
            ("self.host[:count]", "batch.host[:count]"): "not the builder's",
            (", pin_memory=PIN_MEMORY", ""): "pageable: kind A",
            ("def build", "def rebuild"): "another method",
            ("class FlashAttentionMeta", "class FlexAttentionMeta"): "another class",
            (
                "        return ranges",
                "        other.copy_(self.host[:count], non_blocking=True)\n"
                "        return ranges",
            ): "twice",
        },
    ),
    Case(
        "flashinfer-paged-kv-buffers",
        fault="""\
            import numpy as np
            import torch


            class FlashInferMetadataBuilder:
                def __init__(self, config, n):
                    self.pin_memory = not config.use_v2_model_runner and PIN_MEMORY
                    self.paged_kv_indptr = self._make_buffer(n)

                def _compute_flashinfer_kv_metadata(self, blocks, count):
                    # in place
                    np.cumsum(
                        blocks,
                        dtype=np.int32,
                        out=self.paged_kv_indptr.np[1 : count + 1],
                    )
                    return self.paged_kv_indptr.copy_to_gpu(count + 1)
            """,
        cured="""\
            import numpy as np
            import torch


            class FlashInferMetadataBuilder:
                def __init__(self, config, n):
                    self.pin_memory = not config.use_v2_model_runner and PIN_MEMORY
                    self.paged_kv_indptr = self._make_buffer(n)

                def _compute_flashinfer_kv_metadata(self, blocks, count):
                    # in place
                    # in pinned buffers of this build's own: copies of the last build may still
                    # have to read those of the last
                    if self.pin_memory:
                        for buffer in (self.paged_kv_indptr, self.paged_kv_last_page_len):
                            buffer.cpu = torch.zeros_like(buffer.cpu, pin_memory=True)
                            buffer.np = buffer.cpu.numpy()
                        self.paged_kv_indptr_cpu_buffer = torch.zeros_like(
                            self.paged_kv_indptr.cpu, pin_memory=True
                        )
                    np.cumsum(
                        blocks,
                        dtype=np.int32,
                        out=self.paged_kv_indptr.np[1 : count + 1],
                    )
                    return self.paged_kv_indptr.copy_to_gpu(count + 1)
            """,
        near={
            ("not config.use_v2_model_runner and PIN_MEMORY", "False"): "pageable",
            ("np.cumsum(", "np.cumprod("): "not the offsets",
            ("self.paged_kv_indptr.np[", "self.offsets.np["): "another buffer",
            ("np.cumsum(", "offsets = np.cumsum("): "no statement",
            ("def _compute_flashinfer_kv_metadata", "def compute"): "another method",
            ("class FlashInferMeta", "class FlashAttentionMeta"): "another class",
            (
                "        # in place",
                "        np.cumsum(blocks, out=self.paged_kv_indptr.np[1:])",
            ): "twice",
        },
    ),
    Case(
        "pipeline-input-prep-event",
        fault="""\
            import torch


            class GPUModelRunner:
                def __init__(self, vllm_config, device):
                    self.vllm_config = vllm_config
                    self.prepare_inputs_event = None
                    if self.use_async_scheduling:
                        self.copy_stream = torch.cuda.Stream()
                        # Sleeps.
                        self.prepare_inputs_event = torch.cuda.Event(blocking=True)

                    self.device = device
            """,
        cured="""\
            import torch


            class GPUModelRunner:
                def __init__(self, vllm_config, device):
                    self.vllm_config = vllm_config
                    self.prepare_inputs_event = None
                    if self.use_async_scheduling:
                        self.copy_stream = torch.cuda.Stream()
                        # Sleeps.
                        self.prepare_inputs_event = torch.cuda.Event(blocking=True)
                    elif self.vllm_config.max_concurrent_batches > 1 and self.device.type != "cpu":
                        # Pipeline parallelism overlaps steps too.
                        self.prepare_inputs_event = torch.cuda.Event(blocking=True)

                    self.device = device
            """,
        near={
            ("self.use_async_scheduling:", "self.use_async_spec_decode:"): "less often",
            ("self.use_async_scheduling:", "True:"): "always",
            (
                "self.prepare_inputs_event = torch",
                "self.event = torch",
            ): "another event",
            (
                "\n\n        self.device",
                "\n        else:\n            self.copy_stream = None\n"
                "        self.device",
            ): "there is something else",
            ("def __init__", "def load_model"): "another method",
            ("class GPUModelRunner", "class ModelRunner"): "another class",
        },
    ),
    *(
        Case(
            edit,
            fault=BACKUP_TOKENS.replace("class Proposer", f"class {proposer}"),
            cured=OWN_BACKUP_TOKENS.replace("class Proposer", f"class {proposer}"),
            near={
                ("copy_to_gpu(count)", "copy_to_cpu(count)"): "not copied",
                ("ids.copy_to_gpu", "ids_gpu.copy_to_gpu"): "another buffer is copied",
                (".np[i] =", ".cpu[i] ="): "not filled so",
                ("in range(count)", "in count"): "how many is not told",
                ("= CpuGpuBuffer(", "= make_buffer("): "what buffer?",
                ("def __init__", "def prepare"): "made when?",
                ("def prepare_next_token_ids_padded", "def prepare"): "another method",
                (f"class {proposer}", "class Proposer"): "another class",
                (
                    "        return",
                    "        for i in range(count):\n"
                    "            self.backup_next_token_ids.np[i] = 0\n"
                    "        self.backup_next_token_ids.copy_to_gpu(count)\n"
                    "        return",
                ): "twice",
            },
        )
        for edit, proposer in (
            ("drafter-backup-tokens", "SpecDecodeBaseProposer"),
            ("extract-hidden-states-backup-tokens", "ExtractHiddenStatesProposer"),
        )
    ),
    Case(
        "grammar-bitmask-copy",
        fault="""\
            import torch
            from vllm.utils.torch_utils import PIN_MEMORY, async_tensor_h2d


            class StructuredOutputsWorker:
                def apply_grammar_bitmask(self, logits, ids, grammar_bitmask):
                    with torch.cuda.stream(self.copy_stream):
                        bitmask = async_tensor_h2d(
                            grammar_bitmask, out=self.bitmask[: grammar_bitmask.shape[0]]
                        )
                    with torch.cuda.stream(self.copy_stream):
                        indices = async_tensor_h2d(ids, out=self.indices[: len(ids)])
                    return bitmask, indices
            """,
        cured="""\
            import torch
            from vllm.utils.torch_utils import PIN_MEMORY, async_tensor_h2d


            class StructuredOutputsWorker:
                def apply_grammar_bitmask(self, logits, ids, grammar_bitmask):
                    with torch.cuda.stream(self.copy_stream):
                        bitmask = async_tensor_h2d(
                            # A copy: the backend may refill the bitmask before it is on the GPU.
                            grammar_bitmask.copy(),
                            out=self.bitmask[: grammar_bitmask.shape[0]],
                        )
                    with torch.cuda.stream(self.copy_stream):
                        indices = async_tensor_h2d(ids, out=self.indices[: len(ids)])
                    return bitmask, indices
            """,
        near={
            ("async_tensor_h2d(\n", "self.copy(\n"): "copied how?",
            (
                "(\n                grammar_bitmask,",
                "(\n                masks,",
            ): "of what?",
            ("grammar_bitmask, out=", "grammar_bitmask, device="): "no target",
            ("ids, out=", "grammar_bitmask, out="): "twice",
            ("def apply_grammar_bitmask", "def apply"): "another method",
            ("class StructuredOutputsWorker", "class Worker"): "another class",
        },
    ),
    Case(
        "allowed-token-ids-mask",
        fault="""\
            import torch
            from vllm.utils.torch_utils import async_tensor_h2d


            class InputBatch:
                def add_request(self, request):
                    if request.allowed_token_ids:
                        self.allowed_token_ids_mask_cpu_tensor = torch.zeros(
                            self.count,
                            self.vocab_size,
                            dtype=torch.bool,
                            device="cpu",
                        )

                def refresh(self, count):
                    return copy_slice(
                        self.allowed_token_ids_mask_cpu_tensor, self.mask, count
                    )
            """,
        cured="""\
            import torch
            from vllm.utils.torch_utils import PIN_MEMORY, async_tensor_h2d


            class InputBatch:
                def add_request(self, request):
                    if request.allowed_token_ids:
                        self.allowed_token_ids_mask_cpu_tensor = torch.zeros(
                            self.count,
                            self.vocab_size,
                            dtype=torch.bool,
                            device="cpu",
                            pin_memory=PIN_MEMORY,
                        )

                def refresh(self, count):
                    return copy_slice(
                        self.allowed_token_ids_mask_cpu_tensor, self.mask, count
                    )
            """,
        near={
            ('device="cpu",', "device=self.device,"): "on the GPU",
            ('device="cpu",', 'device="cpu", pin_memory=False,'): "not to be pinned",
            ("= torch.zeros(", "= make_mask("): "made how?",
            ("return copy_slice(", "return stage("): "copied how?",
            ("_cpu_tensor, self.mask", "_staged, self.mask"): "not copied",
            ("_mask_cpu_tensor = ", "_mask = "): "another tensor",
            (
                "        )\n\n    def refresh",
                "        )\n        self.allowed_token_ids_mask_cpu_tensor = torch.zeros("
                '1, device="cpu")\n\n    def refresh',
            ): "twice",
            ("def add_request", "def add"): "another method",
            ("class InputBatch", "class Batch"): "another class",
        },
    ),
    *(
        Case(
            f"{rope}-positions-copy",
            fault=f"""\
                import torch


                class GPUModelRunner:
                    def _prepare_inputs(self, count):
                        if self.uses_rope:
                            self.{rope}_positions.gpu[:, :count].copy_(
                                self.{rope}_positions.cpu[:, :count],
                                non_blocking=True,
                            )
                """,
            cured=f"""\
                import torch


                class GPUModelRunner:
                    def _prepare_inputs(self, count):
                        if self.uses_rope:
                            # Row by row: a strided source would be gathered into pageable memory.
                            for row in range(self.{rope}_positions.gpu.shape[0]):
                                self.{rope}_positions.gpu[row, :count].copy_(
                                    self.{rope}_positions.cpu[row, :count],
                                    non_blocking=True,
                                )
                """,
            near={
                ("True,", "False,"): "synchronous",
                ("cpu[:, :count]", "cpu[:, :rows]"): "other columns",
                ("cpu[:, :count]", "cpu[:2, :count]"): "some rows",
                ("cpu[:, :count]", "cpu"): "whole",
                (f"self.{rope}_positions.cpu", "self.positions.cpu"): "another source",
                ("def _prepare_inputs", "def _preprocess"): "another method",
                ("class GPUModelRunner", "class ModelRunner"): "another class",
            },
        )
        for rope in ("mrope", "xdrope")
    ),
    Case(
        "pruned-mrope-positions",
        fault="""\
            import torch


            class GPUModelRunner:
                def _calc_mrope_positions(self, step):
                    first = 0
                    for request in self.requests:
                        end = first + step[request]
                        self.mrope_positions.cpu[:, first:end] = request.positions
                        first = end
            """,
        cured="""\
            import torch

            from vllm.utils.torch_utils import PIN_MEMORY


            class GPUModelRunner:
                def _calc_mrope_positions(self, step):
                    if self.is_multimodal_pruning_enabled:
                        # A new buffer: the drafter's copy of the last may still be queued.
                        self.mrope_positions.cpu = torch.zeros_like(
                            self.mrope_positions.cpu, pin_memory=PIN_MEMORY
                        )
                        self.mrope_positions.np = self.mrope_positions.cpu.numpy()
                    first = 0
                    for request in self.requests:
                        end = first + step[request]
                        self.mrope_positions.cpu[:, first:end] = request.positions
                        first = end
            """,
        near={
            ("first = 0", "first = self.first"): "begins elsewhere",
            ("first = 0", "first = 0\n        last = 0"): "twice",
            ("self.mrope_positions.cpu", "self.positions.cpu"): "another buffer",
            ("def _calc_mrope", "def _compute_mrope"): "another method",
            ("class GPUModelRunner", "class ModelRunner"): "another class",
        },
    ),
    Case(
        "cohere-compass-position-ids",
        fault="""\
            import torch
            from vllm.utils.torch_utils import np_to_pinned_tensor


            class Cohere_VisionTransformer:
                def rot_pos_emb(self, grid):
                    ids = [self.ids(h, w) for h, w in grid]
                    ids = torch.cat(ids, dim=0).to(self.device, non_blocking=True)
                    return self.table[ids]
            """,
        cured="""\
            import torch
            from vllm.utils.torch_utils import async_tensor_h2d, np_to_pinned_tensor


            class Cohere_VisionTransformer:
                def rot_pos_emb(self, grid):
                    ids = [self.ids(h, w) for h, w in grid]
                    ids = async_tensor_h2d(torch.cat(ids, dim=0), self.device)
                    return self.table[ids]
            """,
        near={
            (", non_blocking=True", ""): "synchronous",
            ("torch.cat(", "concat("): "made how?",
            ("to(self.device", "to(self.host"): "to where?",
            ("def rot_pos_emb", "def rot_pos_ids"): "another method",
            ("class Cohere_VisionTransformer", "class Tower"): "another class",
        },
    ),
    Case(
        "cohere-compass-pruning-positions",
        fault="""\
            from vllm.multimodal.evs import compute_mrope_for_media


            class CohereCompassForConditionalGeneration:
                def _postprocess_image_embeds_evs(self, images, merge_size):
                    for emb, size in images:
                        yield compute_mrope_for_media(size, merge_size).to(
                            emb.device, non_blocking=True
                        )
            """,
        cured="""\
            from vllm.multimodal.evs import compute_mrope_for_media
            from vllm.utils.torch_utils import async_tensor_h2d


            class CohereCompassForConditionalGeneration:
                def _postprocess_image_embeds_evs(self, images, merge_size):
                    for emb, size in images:
                        yield async_tensor_h2d(
                            compute_mrope_for_media(size, merge_size), emb.device
                        )
            """,
        near={
            (", non_blocking=True", ""): "synchronous",
            ("yield compute_mrope", "yield self.compute_mrope"): "made how?",
            ("emb.device,", "device,"): "to where?",
            ("def _postprocess_image", "def _postprocess_video"): "another method",
            ("class CohereCompassFor", "class CompassFor"): "another class",
        },
    ),
    *(
        Case(
            edit,
            fault=f"""\
                import torch


                class DotsMoEVitModel:
                    def {method}(self, {tensor}):
                        return self.use(
                            {tensor}.to(self.device, non_blocking=True),
                            self.count,
                        )
                """,
            cured=f"""\
                import torch

                from vllm.utils.torch_utils import async_tensor_h2d


                class DotsMoEVitModel:
                    def {method}(self, {tensor}):
                        return self.use(
                            async_tensor_h2d({tensor}, self.device),
                            self.count,
                        )
                """,
            near={
                (", non_blocking=True", ""): "synchronous",
                ("to(self.device", "to(self.host"): "to where?",
                (f"{tensor}.to", f"{tensor}_pinned.to"): "another tensor",
                (
                    "non_blocking=True),",
                    f"non_blocking=True), {tensor}.to(self.device, non_blocking=True),",
                ): "twice",
                (f"def {method}", "def forward"): "another method",
                ("class DotsMoEVitModel", "class Tower"): "another class",
            },
        )
        for edit, method, tensor in (
            ("dots3-note-position-ids", "rot_pos_emb", "pos_ids"),
            ("dots3-note-sequence-bounds", "prepare_meta", "cu_seqlens_cpu"),
        )
    ),
    Case(
        "multimodal-inputs-copy",
        fault="""\
            import torch
            from vllm.utils.jsontree import json_map_leaves


            def _nested_tensors_h2d(tensors, device):
                return json_map_leaves(
                    lambda leaf: leaf.to(device=device, non_blocking=True)
                    if isinstance(leaf, torch.Tensor)
                    else leaf,
                    tensors,
                )
            """,
        cured="""\
            import torch
            from vllm.utils.jsontree import json_map_leaves
            from vllm.utils.torch_utils import PIN_MEMORY


            def _nested_tensors_h2d(tensors, device):
                return json_map_leaves(
                    lambda leaf: (
                        (
                            leaf
                            # What is no pinned, contiguous memory is staged in some.
                            if not PIN_MEMORY
                            or not leaf.is_cpu
                            or torch.device(device).type == "cpu"
                            or (leaf.is_pinned() and leaf.is_contiguous())
                            else torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf)
                        ).to(device=device, non_blocking=True)
                        if isinstance(leaf, torch.Tensor)
                        else leaf
                    ),
                    tensors,
                )
            """,
        near={
            (", non_blocking=True", ""): "synchronous",
            ("device=device,", "device=device, dtype=torch.half,"): "converted, too",
            ("isinstance(leaf, torch.Tensor)", "leaf is not None"): "of what?",
            ("else leaf,", "else None,"): "the others are dropped",
            ("def _nested_tensors_h2d", "def _nested_tensors"): "another function",
        },
    ),
    Case(
        "num-computed-tokens-copy",
        fault="""\
            import torch
            from vllm.triton_utils import tl, triton
            from vllm.v1.utils import CpuGpuBuffer


            class GPUModelRunner:
                def _prepare_inputs(self, count):
                    if self.use_async_spec_decode:
                        counts = self.input_batch.num_computed_tokens_cpu_tensor[:count].to(
                            device=self.device, non_blocking=True
                        )
                        update(self.num_computed_tokens, counts)
                    else:
                        self.num_computed_tokens[:count].copy_(
                            self.input_batch.num_computed_tokens_cpu_tensor[:count],
                            non_blocking=True,
                        )
            """,
        cured="""\
            import torch
            from vllm.triton_utils import tl, triton
            from vllm.utils.torch_utils import async_tensor_h2d
            from vllm.v1.utils import CpuGpuBuffer


            class GPUModelRunner:
                def _prepare_inputs(self, count):
                    if self.use_async_spec_decode:
                        counts = async_tensor_h2d(
                            # A copy: rejected tokens may be subtracted before it is on the GPU.
                            self.input_batch.num_computed_tokens_cpu_tensor[:count].clone(),
                            device=self.device,
                        )
                        update(self.num_computed_tokens, counts)
                    else:
                        self.num_computed_tokens[:count].copy_(
                            self.input_batch.num_computed_tokens_cpu_tensor[:count],
                            non_blocking=True,
                        )
            """,
        near={
            (", non_blocking=True", ""): "the copy is synchronous",
            ("_tensor[:count].to(", "_tensor[rows].to("): "indexed, which copies",
            ("device=self.device", "device='cpu'"): "to where?",
            ("_cpu_tensor[:count].to(", "_tensor[:count].to("): "another buffer",
            ("def _prepare_inputs", "def _prepare"): "another method",
            ("class GPUModelRunner", "class ModelRunner"): "another class",
            (
                "self.num_computed_tokens[:count].copy_(",
                "self.input_batch.num_computed_tokens_cpu_tensor[:count].to(\n"
                "                device=self.device, non_blocking=True\n"
                "            )\n"
                "            self.num_computed_tokens[:count].copy_(",
            ): "twice",
        },
    ),
]
BY_ID = pytest.mark.parametrize("case", CASES, ids=lambda case: case.edit)
IMPORTING = [case for case in CASES if EDITS[case.edit].import_line]
FROM_VLLM = [case for case in IMPORTING if not EDITS[case.edit].module]
NEAR = pytest.mark.parametrize(
    ("case", "change"),
    [(case, change) for case in CASES for change in case.near],
    ids=lambda value: value.edit if isinstance(value, Case) else value[1][:30],
)


def test_every_edit_has_snippets(edits: list[Edit]) -> None:
    assert {case.edit for case in CASES} == {edit.id for edit in edits}


@BY_ID
def test_the_fault_is_needed_and_cured(case: Case) -> None:
    assert look(case.edit, case.fault) is State.NEEDED
    assert made(case.edit, case.fault) == textwrap.dedent(case.cured)


@BY_ID
def test_the_cured_form_is_left_alone(case: Case) -> None:
    assert look(case.edit, case.cured) is State.PRESENT


@NEAR
def test_near_misses_are_drift(case: Case, change: tuple[str, str]) -> None:
    source = textwrap.dedent(case.fault)
    assert change[0] in source
    near = source.replace(*change)
    assert look(case.edit, near) is State.DRIFTED
    with pytest.raises(BadInput, match=rf"(?s){case.edit} has drifted in .*changed"):
        made(case.edit, near)


@pytest.mark.parametrize("case", IMPORTING, ids=lambda case: case.edit)
@pytest.mark.parametrize("offered", [True, False])
def test_a_cure_without_its_import_is_drift(
    case: Case, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not offered:
        monkeypatch.setitem(TORCH_UTILS, "vllm/utils/torch_utils.py", "OTHER = 1\n")
    line = EDITS[case.edit].import_line or ""
    _, name = parse(line)
    source = textwrap.dedent(case.cured)
    without = "".join(
        text.replace(f"{name}, ", "") if text.startswith("from ") else text
        for text in source.splitlines(keepends=True)
        if text.strip() not in (f"{name},", line)
    )
    assert without != source
    assert look(case.edit, without) is State.DRIFTED


@BY_ID
def test_fault_and_cure_side_by_side_are_drift(case: Case) -> None:
    """A tree half edited by hand: the class is there twice, once in each form."""
    second = textwrap.dedent(case.cured).split("\n\n\n", 1)[1]
    both = textwrap.dedent(case.fault) + "\n\n" + second
    assert look(case.edit, both) is State.DRIFTED


@pytest.mark.parametrize("case", FROM_VLLM, ids=lambda case: case.edit)
def test_a_vllm_without_the_import_is_drift(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TORCH_UTILS, "vllm/utils/torch_utils.py", "OTHER = 1\n")
    assert look(case.edit, case.fault) is State.DRIFTED


@BY_ID
def test_a_file_that_is_gone_is_absent(case: Case) -> None:
    (finding,) = survey(lambda _: None, [EDITS[case.edit]])
    assert finding.state is State.ABSENT


@BY_ID
@pytest.mark.parametrize("source", ["", "import torch\n"])
def test_a_file_that_says_nothing_is_drift(case: Case, source: str) -> None:
    """Above all where an edit is absent by what the file says."""
    assert look(case.edit, source) is State.DRIFTED


@BY_ID
def test_carriage_returns_are_kept(case: Case) -> None:
    fault = textwrap.dedent(case.fault).replace("\n", "\r\n")
    cured = textwrap.dedent(case.cured).replace("\n", "\r\n")
    assert made(case.edit, fault) == cured


REUSED = """\
    import torch
    from vllm.utils.torch_utils import PIN_MEMORY


    class SparseMLACommonMetadataBuilder:
        def __init__(self, n):
            self._lens = torch.empty(n, dtype=torch.int32, pin_memory=PIN_MEMORY)

        def _build_chunked_context_fields(self, common, start, count, query_lens):
            seq_lens = common.seq_lens_cpu_upper_bound
            lens = self._lens[:count]
            torch.subtract(seq_lens[start : start + count], query_lens, out=lens)
            return build_mla_chunked_context_metadata(context_lens_cpu=lens)
    """
MLA_ATTENTION = "vllm/model_executor/layers/attention/mla_attention.py"


def test_a_reused_pinned_buffer_is_a_cure_where_the_host_reads_it() -> None:
    helper = {
        MLA_ATTENTION: "def build(context_lens_cpu):\n    return len(context_lens_cpu)\n"
    }
    assert look("sparse-mla-context-lens", REUSED, helper) is State.PRESENT


@pytest.mark.parametrize(
    "copy",
    [
        "context_lens_cpu.to(device, non_blocking=True)",
        "out.copy_(context_lens_cpu, non_blocking=True)",
        "async_tensor_h2d(context_lens_cpu, device=device)",
    ],
)
def test_a_reused_pinned_buffer_that_is_copied_asynchronously_is_drift(
    copy: str,
) -> None:
    """Kind B: the next build would rewrite what this build's copy still reads."""
    helper = {MLA_ATTENTION: f"def build(context_lens_cpu, device):\n    {copy}\n"}
    (finding,) = survey(
        reader("sparse-mla-context-lens", REUSED, helper),
        [EDITS["sparse-mla-context-lens"]],
    )
    assert finding.state is State.DRIFTED
    assert f"{MLA_ATTENTION}:2 copies the reused pinned buffer" in finding.reason


def test_arguments_pinned_in_the_call_are_a_cure() -> None:
    case = next(c for c in CASES if c.edit == "sm90-sparse-mla-plan")
    source = textwrap.dedent(case.fault)
    for name in ("_qo_cpu", "_kv_cpu", "_lens_cpu"):
        source = source.replace(
            f"    self.{name},\n", f"    self.{name}.pin_memory(),\n"
        )
    assert look(case.edit, source) is State.PRESENT
    pinned = source.replace("torch.empty(n + 1)", "torch.empty(n + 1, pin_memory=True)")
    assert look(case.edit, pinned) is State.DRIFTED


def test_backup_tokens_from_a_list_are_a_cure() -> None:
    """async_tensor_h2d() puts a list into pinned memory of the call's own."""
    source = textwrap.dedent(BACKUP_TOKENS)
    source = source.replace("class Proposer", "class SpecDecodeBaseProposer")
    tokens = "[requests[name].get_token_id(-1) for name in batch.req_ids]"
    copied = f"        async_tensor_h2d({tokens}, device=self.device)\n"
    loop = source[source.index("        for i in") : source.index("        return")]
    source = source.replace(loop, copied)
    assert look("drafter-backup-tokens", source) is State.PRESENT
    reused = source.replace(tokens, "self.tokens[:count]")
    assert look("drafter-backup-tokens", reused) is State.DRIFTED


def test_chunk_offsets_that_are_pinned_once_they_are_made_are_a_cure() -> None:
    case = next(c for c in CASES if c.edit == "step5-prefill-chunks")
    pinned = case.fault.replace('device="cpu")', 'device="cpu").pin_memory()')
    pinned = pinned.replace(
        "offsets[first : last + 1] - offsets[first]",
        "(offsets[first : last + 1] - offsets[first]).pin_memory()",
    )
    assert look(case.edit, pinned) is State.PRESENT


def test_edits_tell_their_files(edits: list[Edit]) -> None:
    for edit in edits:
        assert edit.source.with_suffix(".py").as_posix().endswith(edit.path)
        assert edit.own(edit.regression)
    assert not list(edits_folder().glob("vllm/**/__init__.py"))
