# SPDX-License-Identifier: Apache-2.0
"""Showing results: a table, JSON, a unified diff, a series of mail patches."""

import difflib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import formataddr, formatdate
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_pinned import __version__
from vllm_pinned.errors import BadInput
from vllm_pinned.survey import Finding, Read, State, brought, render
from vllm_pinned.target import Target
from vllm_pinned.write import output_folder

COLOURS = {
    State.NEEDED: "yellow",
    State.PRESENT: "green",
    State.ABSENT: "dim",
    State.DRIFTED: "red",
}


def verdict(findings: list[Finding]) -> str:
    """Whether a tree is patched, in one line."""
    by_state = {s: [f.edit.id for f in findings if f.state is s] for s in State}
    if drifted := by_state[State.DRIFTED]:
        return f"drifted: {', '.join(drifted)}"
    if needed := by_state[State.NEEDED]:
        return f"not patched: needs {', '.join(needed)}"
    return "patched" if by_state[State.PRESENT] else "no edit is about this vLLM"


def table(target: Target, findings: list[Finding], applied: list[str]) -> None:
    """Print the state of each edit for a person."""
    result = Table(box=None, pad_edge=False)
    for heading in ("edit", "kind", "state", "where"):
        result.add_column(heading, no_wrap=True)
    for f in findings:
        where = f.edit.path + (f":{f.line}" if f.line else "")
        state = Text(f.state, COLOURS[f.state])
        result.add_row(f.edit.id, f.edit.metadata["kind"], state, Text(where))
    # Lines stay whole, so that what is piped can be searched.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    print(f"{target}{' (installed)' if target.installed else ''}")
    console.print(result)
    print(verdict(findings) + _how(target, applied))


def _how(target: Target, applied: list[str]) -> str:
    if applied:
        return f" (vllm-pinned applied {', '.join(applied)})"
    if target.version and "pinned." in target.version:
        return " (built by `vllm-pinned wheel`)"
    return ""


def as_json(target: Target, findings: list[Finding], applied: list[str]) -> str:
    """The state of each edit for a program."""
    return json.dumps(
        {
            "vllm_pinned": __version__,
            "target": str(target.path),
            "version": target.version,
            "installed": target.installed,
            "verdict": verdict(findings),
            "applied": applied,
            "edits": [
                {
                    "id": f.edit.id,
                    "kind": f.edit.metadata["kind"],
                    "state": f.state,
                    "file": f.edit.path,
                    "line": f.line,
                    "scope": f.edit.scope,
                    "title": f.edit.title,
                    "reason": f.reason,
                    "references": f.edit.metadata["references"],
                    "drop_when": f.edit.metadata["drop_when"],
                }
                for f in findings
            ],
        },
        indent=2,
    )


def diff(read: Read, changes: Mapping[str, bytes]) -> bytes:
    """A unified diff of `changes`, new bytes by path, as `git apply` takes it."""
    parts = []
    for path, new in sorted(changes.items()):
        old = read(path)
        lines = difflib.diff_bytes(
            difflib.unified_diff,
            _lines(old or b""),
            _lines(new),
            b"/dev/null" if old is None else f"a/{path}".encode(),
            f"b/{path}".encode(),
        )
        parts.append(f"diff --git a/{path} b/{path}\n".encode())
        if old is None:
            parts.append(b"new file mode 100644\n")
        parts += [
            line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
            for line in lines
        ]
    return b"".join(parts)


def _lines(text: bytes) -> list[bytes]:
    """Lines as git has them: ended by a line feed alone."""
    return re.findall(rb"[^\n]*\n|[^\n]+$", text)


@dataclass(frozen=True)
class Author:
    """Name and address for `From:` and `Signed-off-by:`."""

    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"


def git_author() -> Author:
    """The author that the user's git configuration names.

    Raises:
        BadInput: it names none.

    """
    values = []
    for key in ("user.name", "user.email"):
        try:
            done = subprocess.run(
                ["git", "config", "--get", key],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
        except FileNotFoundError:
            raise BadInput(
                "git is not installed; install it to write a series"
            ) from None
        if not done.stdout.strip():
            raise BadInput(
                f"git has no {key} to sign off with; "
                f"run `git config --global {key} ...`"
            )
        values.append(done.stdout.strip())
    return Author(*values)


def series(read: Read, findings: Iterable[Finding], author: Author) -> dict[str, bytes]:
    """One mail patch for each needed edit, each on top of the one before.

    A patch also adds the regression of its edit and this fork's module that it imports,
    where neither the tree nor an earlier patch has them.

    Returns:
        The patches by file name, `0001-....patch` and so on.

    """
    needed = [f for f in findings if f.state is State.NEEDED]
    date = formatdate(localtime=True)
    tree: dict[str, bytes] = {}

    def read_patched(path: str) -> bytes | None:
        return tree.get(path) or read(path)

    done: list[Finding] = []
    result = {}
    for number, finding in enumerate(needed, start=1):
        done.append(finding)
        edit = finding.edit
        here = [f for f in done if f.edit.path == edit.path]
        changes = brought(edit, read_patched)
        changes[edit.path] = render(read, edit.path, here)
        if read_patched(edit.regression) is None:
            regression = edit.own(edit.regression)
            assert regression is not None  # the fork has a test of every edit
            changes[edit.regression] = regression
        body = diff(read_patched, changes)
        tree |= changes
        slug = re.sub(r"\W+", "-", edit.title).strip("-")
        result[f"{number:04}-{slug[:52].rstrip('-')}.patch"] = _mail(
            finding, body, author, date, f"[PATCH {number}/{len(needed)}]"
        )
    return result


def _mail(finding: Finding, body: bytes, author: Author, date: str, tag: str) -> bytes:
    metadata = finding.edit.metadata
    references = "\n".join(f"See: {url}" for url in metadata["references"])
    head = (
        # git knows a patch by this line; the date in it is fixed.
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
        f"From: {formataddr((author.name, author.email))}\n"
        f"Date: {date}\n"
        f"Subject: {tag} {finding.edit.title}\n"
        "MIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        "Content-Transfer-Encoding: 8bit\n\n"
        f"{metadata['body'].rstrip()}\n\n"
        f"{references}\n"
        f"Signed-off-by: {author}\n"
        "---\n"
        "\n"
    )
    return head.encode() + body + b"-- \nvllm-pinned " + __version__.encode() + b"\n\n"


def write_series(folder: Path, patches: Mapping[str, bytes]) -> None:
    """Write `patches` into `folder`, which gets no other patch.

    Raises:
        BadInput: the folder holds patches already, or cannot be written.

    """
    try:
        with output_folder(folder):
            if next(folder.glob("*.patch"), None):
                raise BadInput(f"{folder} holds patches already; give an empty folder")
            try:
                for name, text in patches.items():
                    (folder / name).write_bytes(text)
            except BaseException:
                for name in patches:
                    (folder / name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise BadInput(
            f"cannot write to {folder} ({error.strerror}); give another folder"
        ) from None
