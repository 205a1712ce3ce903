# SPDX-License-Identifier: Apache-2.0
"""Edits on released files that somebody has reformatted, renamed or changed.

What keeps the fault keeps the edit; what removes it is drift, never a wrong edit.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_pinned.edits import load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.survey import Read, State, changes, survey
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
}
BY_ID = pytest.mark.parametrize("edit", SUBJECTS)
SLOW = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def reader(trees: dict[str, Path], edit: str, source: bytes) -> Read:
    """The tree of the edit's release, with `source` as the edited file."""
    read = resolve(str(trees[SUBJECTS[edit][0]])).read
    return lambda path: source if path == EDITS[edit].path else read(path)


def released(trees: dict[str, Path], edit: str) -> bytes:
    return (trees[SUBJECTS[edit][0]] / EDITS[edit].path).read_bytes()


def made(trees: dict[str, Path], edit: str, source: bytes) -> bytes:
    """`source` with the edit made."""
    read = reader(trees, edit, source)
    return changes(read, survey(read, [EDITS[edit]]))[EDITS[edit].path]


def state(trees: dict[str, Path], edit: str, source: bytes) -> State:
    (finding,) = survey(reader(trees, edit, source), [EDITS[edit]])
    return finding.state


def scope(source: bytes, edit: str) -> ast.AST:
    """The definition that the edit is in."""
    node: ast.AST = ast.parse(source)
    for name in EDITS[edit].scope.split("."):
        node = next(n for n in ast.walk(node) if getattr(n, "name", "") == name)
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
    assert ast.dump(ast.parse(result)) == ast.dump(ast.parse(made(trees, edit, source)))


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
    """A comment after some of the commas and brackets inside calls of the scope."""
    node = scope(source, edit)
    lines = range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]
    depth, places = 0, []
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        depth += (token.string in ("(", "[")) - (token.string in (")", "]"))
        if token.string in (",", "(") and depth and token.start[0] in lines:
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
    assert ast.dump(ast.parse(renamed)) == ast.dump(
        ast.parse(with_names(made(trees, edit, source), edit, chosen))
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
    (finding,) = survey(reader(trees, edit, source), [EDITS[edit]])
    (fault,) = finding.replacements
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
    assert result.endswith(source[fault.end :])
