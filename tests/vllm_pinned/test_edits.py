# SPDX-License-Identifier: Apache-2.0
"""Each edit on small snippets of ours: the fault, its cured forms, near misses.

The snippets have the names that a rule looks for and nothing else of vLLM.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_pinned.edits import Edit, load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.survey import Read, State, changes, survey

TORCH_UTILS = {"vllm/utils/torch_utils.py": "PIN_MEMORY = True\n"}
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
    return lambda path: tree[path].encode() if path in tree else None


@dataclass(frozen=True)
class Case:
    """Sources for one edit; `near` maps a replacement in `fault` to its reason."""

    edit: str
    fault: str
    cured: str
    near: dict[tuple[str, str], str]


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
]
BY_ID = pytest.mark.parametrize("case", CASES, ids=lambda case: case.edit)
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


@BY_ID
@pytest.mark.parametrize("offered", [True, False])
def test_a_cure_without_its_import_is_drift(
    case: Case, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not offered:
        monkeypatch.setitem(TORCH_UTILS, "vllm/utils/torch_utils.py", "OTHER = 1\n")
    lines = textwrap.dedent(case.cured).splitlines(keepends=True)
    without = "".join(
        line.replace("PIN_MEMORY, ", "")
        for line in lines
        if line.strip() != "PIN_MEMORY,"
        and line != "from vllm.utils.torch_utils import PIN_MEMORY\n"
    )
    assert look(case.edit, without) is State.DRIFTED


@BY_ID
def test_fault_and_cure_side_by_side_are_drift(case: Case) -> None:
    """A tree half edited by hand: the class is there twice, once in each form."""
    second = textwrap.dedent(case.cured).split("\n\n\n", 1)[1]
    both = textwrap.dedent(case.fault) + "\n\n" + second
    assert look(case.edit, both) is State.DRIFTED


@BY_ID
def test_a_vllm_without_pin_memory_is_drift(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TORCH_UTILS, "vllm/utils/torch_utils.py", "OTHER = 1\n")
    assert look(case.edit, case.fault) is State.DRIFTED


@BY_ID
def test_a_file_that_is_gone_is_absent(case: Case) -> None:
    (finding,) = survey(lambda _: None, [EDITS[case.edit]])
    assert finding.state is State.ABSENT


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


def test_edits_tell_their_files(edits: list[Edit]) -> None:
    for edit in edits:
        assert edit.source.with_suffix(".py").as_posix().endswith(edit.path)
        assert not Path(edit.source.parent, "__init__.py").exists()
