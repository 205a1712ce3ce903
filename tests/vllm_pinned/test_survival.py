# SPDX-License-Identifier: Apache-2.0
"""Edits on released files that somebody has reformatted, renamed or changed.

What keeps the fault keeps the edit; what removes it is drift, never a wrong edit.
"""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vllm_pinned.conftest import defined
from vllm_pinned.edits import load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.survey import Read, Replacement, State, changes, survey
from vllm_pinned.target import resolve

EDITS = {edit.id: edit for edit in load_edits()}

# A release that needs the edit, local names of its scope that a rule should not care
# about, and what makes the fault the fault, each with a change that unmakes it.
SUBJECTS = {
    "eplb-gloo-receive-staging": (
        "0.29.0",
        ("cpu_tensor", "recv_staging", "dst_tensor", "tensor", "p2p_ops"),
        (
            (r'(empty_like\(tensor), device="cpu"', r"\1"),
            (r"(dst_tensor\.copy_\(cpu_tensor), non_blocking=True", r"\1"),
            (r'(empty_like\(tensor, device="cpu")', r"\1, pin_memory=PIN_MEMORY"),
            (r"torch\.empty_like\(tensor", r"torch.empty(tensor.shape"),
        ),
    ),
    "sparse-mla-context-lens": (
        "0.29.0",
        ("context_lens_cpu", "seq_lens_cpu", "num_decodes", "num_prefills"),
        (
            (r"context_lens_cpu=context_lens_cpu", r"context_lens_cpu=None"),
            (r"common_attn_metadata\.seq_lens_cpu_upper_bound", r"self.seq_lens"),
            (r"(: num_decodes \+ num_prefills\])\s+- ", r"\1 * "),
            (r"build_mla_chunked_context_metadata\(", r"build_pinned_metadata("),
        ),
    ),
    "dense-mla-context-lens": (
        "0.29.0",
        ("context_lens_cpu", "seq_lens_cpu", "num_prefills", "reqs_start"),
        (
            (r"context_lens_cpu=context_lens_cpu", r"context_lens_cpu=None"),
            (r"(seq_lens_cpu\[reqs_start:)num_reqs\] - ", r"\1] - "),
            (r"reqs_start = num_decodes", r"reqs_start = 0"),
            (r"(\(\s+seq_lens_cpu\[reqs_start:num_reqs\]) - ", r"\1 * "),
        ),
    ),
    "sm90-sparse-mla-plan": (
        "0.33.0",
        ("num_tokens", "kv_lens", "num_indices"),
        (
            (r"(wrapper\.plan\(\s+self\._qo_cpu)", r"\1.pin_memory()"),
            (r"(self\._lens_cpu = torch\.full\()", r"\1pin_memory=True, *"),
            (r"self\.wrapper\.plan\(", r"self.wrapper.replan("),
            (r"self\._kv_cpu,\n", r"self.kv_indptr,\n"),
        ),
    ),
    "flashinfer-dcp-prefill-plan": (
        "0.33.0",
        ("qo_indptr_cpu", "num_qo_heads", "head_dim", "window_left"),
        (
            (r"self\._new_tokens\.plan\(", r"self._new_tokens.begin("),
            (r"self\._context\.plan\(", r"self._native_context.plan("),
            (r"(\n +)(self\._context\.plan\()", r"\1done = \2"),
        ),
    ),
    "flashinfer-prefill-plan": (
        "0.33.0",
        ("prefill_wrapper", "qo_indptr_prefill_cpu", "o_dtype"),
        (
            (r"prefill_wrapper\.plan\(\s+qo_indptr=", r"plan(qo_indptr="),
            (r"(paged_kv_last_page_len_prefill_cpu,[^)]+)head_dim_qk=", r"\1head_dim="),
            (r"(page_size=self.page_size,\s+)num_qo_heads", r"\1head_dim_qk=1, num_qo"),
        ),
    ),
    "flashinfer-cascade-plan": (
        "0.29.0",
        ("attn_metadata", "shared_qo_indptr_cpu"),
        (
            (r"(attn_metadata)\.cascade_wrapper\.plan\(", r"\1.shared_wrapper.plan("),
            (r"(cascade_wrapper)\.plan\(", r"\1.begin("),
        ),
    ),
    "flashinfer-decode-plan": (
        "0.33.0",
        ("indptr_cpu", "last_page_len_cpu", "window_left"),
        (
            (r"\n        self\.plan\(", r"\n        self.begin("),
            (r"\n    fast_decode_plan\(", r"\n    return fast_decode_plan("),
            (r"(\n    fast_decode_plan\(\s+)self,", r"\1"),
        ),
    ),
    "sm90-sparse-mla-plan-guard": (
        "0.30.0",
        ("num_tokens", "kv_lens"),
        (
            (r"self\.wrapper\.plan\(", r"self.wrapper.replan("),
            (r"self\.wrapper\.plan\(", r"wrapper.plan("),
        ),
    ),
    "step5-prefill-chunks": (
        "0.33.0",
        ("local_cu_k", "cu_k", "start", "end", "chunks"),
        (
            (r"(torch\.arange\([^)]*)\),\n", r"\1).pin_memory(),\n"),
            (r"(cu_k\[start : end \+ 1\]) - ", r"\1 * "),
            (r"(\n +)local_cu_k,\n", r"\1cu_k[start : end + 1],\n"),
            (r"PrefillChunk\(\n", r"dict(\n"),
        ),
    ),
    "step5-prefill-plan": (
        "0.33.0",
        ("chunk", "index", "start", "end", "k", "query"),
        (
            (r"(self\._prefill_plan_event\.)synchronize\(", r"\1query("),
            (r"\n +self\._prefill_plan_event\.record\(.*", r""),
            (r"self\._attention\.plan\(", r"self._attention.begin_forward("),
            (r"(\n +)(self\._attention\.plan\()", r"\1done = \2"),
        ),
    ),
    "drafter-backup-tokens": (
        "0.33.0",
        ("num_reqs", "i", "requests", "gpu_input_batch", "backup_tokens_gpu"),
        (
            (r"(self\.backup_next_token_ids)\.copy_to_gpu\(", r"\1.copy_to_cpu("),
            (r"(self\.backup_next_token_ids)\.np\[", r"\1.cpu["),
            (r"(self\.backup_next_token_ids = )CpuGpuBuffer\(", r"\1make_buffer("),
            (r"in range\(num_reqs\):(\s+self\.backup)", r"in requests:\1"),
        ),
    ),
    "extract-hidden-states-backup-tokens": (
        "0.29.0",
        ("num_reqs", "i", "requests", "gpu_input_batch", "backup_tokens_gpu"),
        (
            (r"(self\.backup_next_token_ids)\.copy_to_gpu\(", r"\1.copy_to_cpu("),
            (r"(self\.backup_next_token_ids)\.np\[", r"\1.cpu["),
            (r"(self\.backup_next_token_ids = )CpuGpuBuffer\(", r"\1make_buffer("),
            (r"in range\(num_reqs\):(\s+self\.backup)", r"in requests:\1"),
        ),
    ),
    "grammar-bitmask-copy": (
        "0.29.0",
        ("logits", "bitmask", "mapping", "logits_indices"),
        (
            (r"async_copy_to_gpu\(\s+grammar", r"copy(grammar"),
            (r"(async_copy_to_gpu\(\s+)grammar_bitmask", r"\1self.grammar_bitmask"),
            (r"(grammar_bitmask, )out=self.grammar_bitmask", r"\1device=self.device"),
        ),
    ),
    "allowed-token-ids-mask": (
        "0.33.0",
        ("req_index", "sampling_params", "request"),
        (
            (r'(dtype=torch\.bool,\s+device=)"cpu"(,\s+\))', r"\1self.device\2"),
            (r'(dtype=torch\.bool,\s+device="cpu"),', r"\1, pin_memory=False,"),
            (r"copy_slice(\(\s+self\.allowed_token_ids_mask)", r"copy_all\1"),
            (r"(allowed_token_ids_mask_cpu_tensor = torch\.)zeros", r"\1mask"),
        ),
    ),
    "num-computed-tokens-copy": (
        "0.26.0",  # in later ones ruff makes a tuple of what a del names
        ("num_reqs", "cpu_values", "prev_req_id_to_index"),
        (
            (r"(_cpu_tensor\[:num_reqs\]\.to\([^)]+), non_blocking=True", r"\1"),
            (r"(_cpu_tensor\[):num_reqs\]\.to\(", r"\1req_indices].to("),
            (r"num_computed_tokens_cpu_tensor(\[:num_reqs\]\.to\()", r"counts\1"),
        ),
    ),
    **{
        f"{rope}-positions-copy": (
            release,
            ("total_num_scheduled_tokens",),
            (
                (rf"({rope}_positions\.cpu\[):(, :total)", r"\1row\2"),
                (rf"self\.{rope}_positions\.cpu(\[:, :total)", r"self.positions.cpu\1"),
                (rf"({rope}_positions\.cpu\[[^]]+\],\s+)non_blocking=True,", r"\1"),
            ),
        )
        for rope, release in (("mrope", "0.27.1"), ("xdrope", "0.28.0"))
    },
    "pruned-mrope-positions": (
        "0.33.0",
        ("req", "prompt_part_len", "dst_start"),
        (
            (r"self\.mrope_positions\.cpu(\[:, dst_start)", r"self.positions.cpu\1"),
            (r"mrope_pos_ptr = 0", r"mrope_pos_ptr = self.first"),
        ),
    ),
    "cohere-compass-position-ids": (
        "0.33.0",
        ("max_grid_size",),
        (
            (r"(torch\.cat\(pos_ids, dim=0\)\.to\(self\.device), non_b[^)]+", r"\1"),
            (r"torch\.cat\((pos_ids, dim=0\)\.to\()", r"torch.stack(\1"),
        ),
    ),
    "cohere-compass-pruning-positions": (
        "0.33.0",
        ("emb", "size", "merge_size", "image_embeds_out"),
        (
            (r"(compute_mrope_for_media\([^)]+\)\.to\([^,]+),[^)]+", r"\1"),
            (r"compute_mrope_for_media(\([^)]+\)\.to\()", r"compute_positions\1"),
        ),
    ),
    "dots3-note-position-ids": (
        "0.33.0",
        ("rotary_pos_emb_full", "max_grid_size"),
        (
            (r"(pos_ids\.to\(self\.device), non_blocking=True", r"\1"),
            (r"pos_ids(\.to\(self\.device, non_b)", r"positions\1"),
        ),
    ),
    "dots3-note-sequence-bounds": (
        "0.33.0",
        ("seq_per_frame", "frame_lengths", "resolved_attn"),
        (
            (r"(cu_seqlens_cpu\.to\(self\.device), non_blocking=True", r"\1"),
            (r"cu_seqlens_cpu(\.to\(self\.device, non_b)", r"bounds\1"),
        ),
    ),
    "multimodal-inputs-copy": (
        "0.29.0",
        ("x", "tensors"),
        (
            (r"(x\.to\(device=device), non_blocking=True", r"\1"),
            (r"(lambda x: x\.to\(device=device, non[^)]*\))[^,]*,", r"\1,"),
        ),
    ),
    "h2d-race-check": (
        "0.33.0",
        ("visible_device_index", "parallel_config", "assigned_physical_gpu_ids"),
        (
            (r"(set_device_index\()self\.device\)", r"\1self.rank)"),
            (r"torch\.accelerator\.set_device_index\(", r"torch.cuda.set_device("),
            (r"init_worker_distributed_environment\(", r"init_distributed("),
            (r"(\n +)(torch\.accelerator\.set_dev)", r"\1install_h2d_race_check()\1\2"),
        ),
    ),
    "h2d-race-check-variables": (
        "0.33.0",
        ("env_with_choices", "maybe_convert_int"),
        (
            (r'"VLLM_GPU_SYNC_CHECK": env', r'"VLLM_SYNC_CHECK": env'),
            (r"(\n)environment_variables: ", r"\1variables: "),
        ),
    ),
    "flash-attn-mm-prefix-ranges": (
        "0.33.0",
        ("num_mm_tokens", "mm_query_ranges", "mm_ranges"),
        (
            (r"(mm_prefix_query_ranges_cpu\[:num_mm_tokens\],)\s+non_blo.*", r"\1"),
            (r"(dtype=torch\.int32), pin_memory=PIN_MEMORY", r"\1"),
            (r"(mm_prefix_query_ranges_cpu\[:num_mm_tokens\]),", r"\1.pin_memory(),"),
            (r"mm_query_ranges\.copy_\(", r"torch.Tensor.copy_(mm_query_ranges, "),
        ),
    ),
    "flashinfer-paged-kv-buffers": (
        "0.28.0",
        ("num_blocks_np", "seq_lens_np", "num_reqs"),
        (
            (r"not vllm_config\.use_v2_model_runner and PIN_MEMORY", r"False"),
            (r"out=self\.paged_kv_indptr\.np", r"out=self.offsets_np"),
            (r"np\.cumsum\(", r"np.cumprod("),
        ),
    ),
    "pipeline-input-prep-event": (
        "0.33.0",
        ("model_config", "scheduler_config", "parallel_config"),
        (
            (r"if self\.use_async_scheduling(:\n +self\.async_o)", r"if True\1"),
            (r"self\.prepare_inputs_event = torch\.cuda", r"self.event = torch.cuda"),
            (r"(self\.prepare_inputs_event = )torch\.cuda\.Event", r"\1make_event"),
        ),
    ),
}
BY_ID = pytest.mark.parametrize("edit", SUBJECTS)
SLOW = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# Examples share most of the work: without this they take twice as long.
remembered = functools.lru_cache(maxsize=32)


def tree_of(trees: dict[str, Path], edit: str) -> Path:
    """The tree of the edit's release."""
    return trees[SUBJECTS[edit][0]]


def reader(root: Path, edit: str, source: bytes) -> Read:
    """The tree at `root`, with `source` as the edited file."""
    read = resolve(str(root)).read
    return lambda path: source if path == EDITS[edit].path else read(path)


def released(trees: dict[str, Path], edit: str) -> bytes:
    return (tree_of(trees, edit) / EDITS[edit].path).read_bytes()


def made(trees: dict[str, Path], edit: str, source: bytes) -> bytes:
    """`source` with the edit made, in a tree of the edit's release."""
    return made_in(tree_of(trees, edit), edit, source)


@remembered
def made_in(root: Path, edit: str, source: bytes) -> bytes:
    read = reader(root, edit, source)
    return changes(read, survey(read, [EDITS[edit]]))[EDITS[edit].path]


@remembered
def faults(root: Path, edit: str) -> tuple[Replacement, ...]:
    """What the edit replaces in the release."""
    (finding,) = survey(resolve(str(root)).read, [EDITS[edit]])
    return finding.replacements


def state(trees: dict[str, Path], edit: str, source: bytes) -> State:
    read = reader(tree_of(trees, edit), edit, source)
    (finding,) = survey(read, [EDITS[edit]])
    return finding.state


@remembered
def program(source: bytes) -> str:
    """What `source` says, however it is formatted."""
    return ast.dump(ast.parse(source))


@remembered
def scope(source: bytes, edit: str) -> ast.AST:
    """The definition that the edit is in."""
    node: ast.AST = ast.parse(source)
    for name in EDITS[edit].scope.split("."):
        node = next(n for n in ast.walk(node) if defined(n) == name)
    return node


@BY_ID
@SLOW
@given(
    width=st.sampled_from([40, 60, 79, 100, 120, 200]),
    quotes=st.sampled_from(["single", "double"]),
    comments=st.lists(st.integers(0, 10**6), max_size=6),
)
def test_other_formatting(
    trees: dict[str, Path], edit: str, width: int, quotes: str, comments: list[int]
) -> None:
    """Line lengths, quotes and comments inside calls: the same program, edited alike."""
    source = released(trees, edit)
    other = with_comments(reformatted(source, width, quotes), edit, comments)
    result = made(trees, edit, other)
    # At another width ruff puts brackets around the names of a `del`: both get them.
    same = reformatted(made(trees, edit, source), width, quotes)
    assert program(result) == program(same)


@remembered
def reformatted(source: bytes, width: int, quotes: str) -> bytes:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "format", "--isolated"),
            f"--config=line-length={width}",
            f"--config=format.quote-style='{quotes}'",
            *("--stdin-filename=x.py", "-"),
        ],
        input=source,
        capture_output=True,
        check=True,
    )
    return done.stdout


def with_comments(source: bytes, edit: str, picks: list[int]) -> bytes:
    """A comment after some of the commas and brackets inside calls of the scope.

    Not between the names of a comprehension: ast-grep's parser ends the block there.
    """
    node = scope(source, edit)
    lines = range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]
    depth, names, places = 0, False, []
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        depth += (token.string in ("(", "[")) - (token.string in (")", "]"))
        names = token.string == "for" or (names and token.string != "in")
        inside = depth and not names and token.start[0] in lines
        if token.string in (",", "(") and inside:
            places.append(token.end)
    text = source.decode().splitlines(keepends=True)
    for line, column in sorted({places[p % len(places)] for p in picks}, reverse=True):
        row = text[line - 1]
        text[line - 1] = f"{row[:column]}  # note\n {row[column:]}"
    return "".join(text).encode()


@BY_ID
@SLOW
@given(data=st.data())
def test_other_local_names(
    trees: dict[str, Path], edit: str, data: st.DataObject
) -> None:
    """Renaming locals before the edit or after it gives the same file."""
    names = SUBJECTS[edit][1]
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1))
    source = released(trees, edit)
    renamed = made(trees, edit, with_names(source, edit, chosen))
    assert program(renamed) == program(
        with_names(made(trees, edit, source), edit, chosen)
    )


def with_names(source: bytes, edit: str, names: set[str]) -> bytes:
    """`source` with local variables of the scope renamed, keywords of calls kept."""
    places = []
    for node in ast.walk(scope(source, edit)):
        if isinstance(node, ast.Name) and node.id in names:
            places.append((node.lineno, node.col_offset, node.id))
        elif isinstance(node, ast.arg) and node.arg in names:
            places.append((node.lineno, node.col_offset, node.arg))
    lines = source.splitlines(keepends=True)
    for line, column, name in sorted(places, reverse=True):
        row, new = lines[line - 1], f"some_{name}".encode()
        lines[line - 1] = row[:column] + new + row[column + len(name) :]
    return b"".join(lines)


@pytest.mark.parametrize(
    ("edit", "unmake"),
    [(edit, unmake) for edit, subject in SUBJECTS.items() for unmake in subject[2]],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_what_unmakes_the_fault_is_drift(
    trees: dict[str, Path], edit: str, unmake: tuple[str, str]
) -> None:
    source = released(trees, edit).decode()
    changed, count = re.subn(*unmake, source)
    assert count
    assert state(trees, edit, changed.encode()) is State.DRIFTED
    with pytest.raises(BadInput, match=f"{edit} has drifted"):
        made(trees, edit, changed.encode())


@BY_ID
@settings(SLOW, max_examples=40)
@given(data=st.data())
def test_any_token_of_the_fault_gone_or_changed(
    trees: dict[str, Path], edit: str, data: st.DataObject
) -> None:
    """One token of the fault deleted, doubled or renamed: drift, or the edit still holds.

    `made` checks that an edit it makes is recognised as the cure in the result; here
    that the result still parses, and that nothing outside the fault differs.
    """
    source = released(trees, edit)
    root = tree_of(trees, edit)
    fault = data.draw(st.sampled_from(faults(root, edit)))
    text = source[fault.start : fault.end].decode()
    tokens = list(re.finditer(r"\w+|[^\w\s]", text))
    token = data.draw(st.sampled_from(tokens))
    new = data.draw(st.sampled_from(["", token[0] * 2, "other", "1", "+", ",", "("]))
    changed = text[: token.start()] + new + text[token.end() :]
    mutant = source[: fault.start] + changed.encode() + source[fault.end :]
    if state(trees, edit, mutant) is State.DRIFTED:
        return
    result = made(trees, edit, mutant)
    ast.parse(result)
    assert result.endswith(source[faults(root, edit)[-1].end :])
