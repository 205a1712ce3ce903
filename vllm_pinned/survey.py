# SPDX-License-Identifier: Apache-2.0
"""Surveying a tree: the state of each edit, read from the files themselves.

One run of ast-grep looks for every fault, every cured form and every scope. Its
matches give the state of an edit and, where it is needed, the bytes to replace.
"""

import ast
import functools
import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from vllm_pinned.edits import RULE_KEYS, Edit
from vllm_pinned.errors import BadInput, one_line
from vllm_pinned.imports import add_import, binds, line_end, module_file, parse

Read = Callable[[str], bytes | None]
"""Bytes of a file of the tree by its path (`vllm/a/b.py`), None where absent."""


class State(StrEnum):
    """What an edit is to a tree."""

    NEEDED = "needed"
    PRESENT = "present"
    ABSENT = "absent"
    DRIFTED = "drifted"


@dataclass(frozen=True)
class Replacement:
    """New bytes for `start`..`end`, byte offsets into the file."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Finding:
    """The state of one edit in one tree.

    Attributes:
        replacements: What to replace where the state is needed, else empty.
        line: 1-based line of the first fault, cured form or scope; None if none.
        reason: Why the edit has drifted, else empty.

    """

    edit: Edit
    state: State
    replacements: tuple[Replacement, ...] = ()
    line: int | None = None
    reason: str = ""


def survey(read: Read, edits: Iterable[Edit]) -> list[Finding]:
    """The state of each of `edits` in the tree that `read` reads.

    Raises:
        BadInput: a rule is broken, or ast-grep is missing.

    """
    edits = list(edits)
    wanted = {edit.path for edit in edits}
    wanted.update(form["unless"]["file"] for e in edits for form in _guarded(e))
    files = {path: text for path in sorted(wanted) if (text := read(path)) is not None}
    matches = _scan(files, [rule for edit in edits for rule in _rules(edit)])
    return [_finding(edit, files, matches, read) for edit in edits]


def render(read: Read, path: str, needed: Iterable[Finding]) -> bytes:
    """The file at `path` with the edits of `needed`, findings in that file, made.

    Edits that replace some of the same bytes are made one after the other, in their
    order, each found again in what the ones before it left.

    Raises:
        BadInput: an edit is not needed any more after those before it.

    """
    needed = list(needed)
    source = read(path)
    assert source is not None  # a needed edit has a file
    clear = [
        finding
        for number, finding in enumerate(needed)
        if not any(_overlap(finding, other) for other in needed[:number])
    ]
    result = _replace(source, clear)
    if len(clear) == len(needed):
        return result

    def read_on(name: str) -> bytes | None:
        return result if name == path else read(name)

    rest = survey(read_on, [f.edit for f in needed if f not in clear])
    for finding in rest:
        if finding.state is not State.NEEDED:
            names = ", ".join(f.edit.id for f in clear)
            raise BadInput(
                f"edit {finding.edit.id} is {finding.state} in {path} after {names} "
                f"was made; mend the rule in {finding.edit.source}"
            )
    return render(read_on, path, rest)


def _overlap(one: Finding, other: Finding) -> bool:
    """Whether the two replace some of the same bytes."""
    return any(
        r.start < s.end and s.start < r.end
        for r in one.replacements
        for s in other.replacements
    )


def _replace(source: bytes, findings: Iterable[Finding]) -> bytes:
    """`source` with the replacements and imports of `findings`, which are apart."""
    replacements = sorted(
        (r for f in findings for r in f.replacements), key=lambda r: r.start
    )
    parts, at = [], 0
    for replacement in replacements:
        parts.append(source[at : replacement.start])
        parts.append(re.sub(rb"\r?\n", line_end(source), replacement.text))
        at = replacement.end
    parts.append(source[at:])
    result = b"".join(parts)
    for finding in findings:
        if finding.edit.import_line:
            result = add_import(result, finding.edit.import_line, finding.edit.path)
    return result


def changes(read: Read, findings: Iterable[Finding]) -> dict[str, bytes]:
    """The files that the needed edits change or bring, with their new bytes, checked.

    Raises:
        BadInput: an edit has drifted, or one does not hold once it is made.

    """
    findings = list(findings)
    refuse_drift(findings)
    by_path: dict[str, list[Finding]] = {}
    result: dict[str, bytes] = {}
    for finding in findings:
        if finding.state is State.NEEDED:
            by_path.setdefault(finding.edit.path, []).append(finding)
            result |= brought(finding.edit, read)
    for path, needed in by_path.items():
        result[path] = render(read, path, needed)
    after = survey(
        lambda path: result.get(path) or read(path), (f.edit for f in findings)
    )
    for finding in after:
        if finding.state not in (State.PRESENT, State.ABSENT):
            raise BadInput(
                f"edit {finding.edit.id} is {finding.state} in {finding.edit.path} "
                f"after it was made; mend the rule in {finding.edit.source}"
            )
    return result


def brought(edit: Edit, read: Read) -> dict[str, bytes]:
    """This fork's module that `edit` imports, by path, where the tree lacks it."""
    if edit.module is None or read(edit.module) is not None:
        return {}
    text = edit.own(edit.module)
    assert text is not None  # `module` names a file of the fork's own
    return {edit.module: text}


def refuse_drift(findings: Iterable[Finding]) -> None:
    """Raise BadInput that names every edit that has drifted, if one has."""
    drifted = [f for f in findings if f.state is State.DRIFTED]
    if not drifted:
        return
    lines = []
    for f in drifted:
        where = f.edit.path + (f":{f.line}" if f.line else "")
        lines.append(
            f"edit {f.edit.id} has drifted in {where}, {f.edit.scope}: {f.reason}"
        )
    lines.append(
        "nothing was changed; "
        "use an unchanged vLLM of 0.26.0 or newer (`vllm-pinned revert` takes back "
        "what an older one applied), or a newer vllm-pinned"
    )
    raise BadInput("\n".join(lines))


# What is asked of ast-grep.


def _guarded(edit: Edit) -> list[dict[str, Any]]:
    return [form for form in edit.metadata["cured"] if "unless" in form]


def _rules(edit: Edit) -> list[dict[str, Any]]:
    """The rules that tell the state of `edit`, each with an id of its own."""
    scope = edit.scope.split(".")
    base = {key: edit.document[key] for key in RULE_KEYS if key in edit.document}

    def rule(name: str, **parts: Any) -> dict[str, Any]:
        return {"id": f"{edit.id}/{name}", "language": "python", **parts}

    fault = {"all": [edit.document["rule"], {"inside": _inside(scope)}]}
    rules = [
        rule("scope", rule=_scope_rule(scope)),
        rule("fault", **{**base, "rule": fault, "fix": edit.document["fix"]}),
    ]
    utils = {"utils": base["utils"]} if "utils" in base else {}
    for number, form in enumerate(edit.metadata["cured"]):
        cured = {"all": [form["rule"], {"inside": _inside(scope)}]}
        constraints = form.get("constraints", {})
        rules.append(
            rule(f"cured-{number}", rule=cured, constraints=constraints, **utils)
        )
        if "unless" in form:
            rules.append(rule(f"unless-{number}", rule=form["unless"]["rule"]))
    if "absent" in edit.metadata:
        # Of the whole file: the scope may be what this vLLM lacks.
        rules.append(rule("absent", rule=edit.metadata["absent"]["rule"], **utils))
    return rules


def _scope_rule(scope: list[str]) -> dict[str, Any]:
    """Matches the definition that `scope` names, itself inside the outer ones."""
    *outer, name = scope
    definition = {
        "any": [{"kind": "function_definition"}, {"kind": "class_definition"}],
        "has": {"field": "name", "regex": f"^{name}$"},
    }
    variable = {
        "kind": "assignment",
        "has": {"field": "left", "regex": f"^{name}$"},
        "inside": {"kind": "expression_statement", "inside": {"kind": "module"}},
    }
    result: dict[str, Any] = {"any": [definition, variable]}
    if outer:
        result["inside"] = _inside(outer)
    return result


def _inside(scope: list[str]) -> dict[str, Any]:
    return {**_scope_rule(scope), "stopBy": "end"}


def _scan(
    files: Mapping[str, bytes], rules: list[dict[str, Any]]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Matches of `rules` in `files`, by file and rule id."""
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-pinned-") as folder:
            for path, text in files.items():
                file = Path(folder, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text)
            # Keeps ast-grep from one in the folders around.
            Path(folder, "sgconfig.yml").write_text("ruleDirs: []\n")
            done = _ast_grep(folder, rules)
            if done.returncode not in (0, 1) or not done.stdout.startswith(b"["):
                raise BadInput(_broken_rule(folder, rules) or _said(done))
    except OSError as error:
        raise BadInput(
            f"cannot write temporary files or run ast-grep ({one_line(error)}); "
            "free some room, or set TMPDIR to another folder"
        ) from None
    result: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for match in json.loads(done.stdout):
        path = Path(match["file"]).as_posix()
        result.setdefault((path, match["ruleId"]), []).append(match)
    return result


def _ast_grep(
    folder: str, rules: list[dict[str, Any]]
) -> subprocess.CompletedProcess[bytes]:
    beside = Path(sysconfig.get_path("scripts"), "ast-grep")
    program = str(beside) if beside.is_file() else shutil.which("ast-grep")
    if program is None:
        raise BadInput("ast-grep is not installed; run `pip install ast-grep-cli`")
    # JSON is YAML, and a file has room for more than an argument has.
    text = "\n---\n".join(json.dumps(rule) for rule in rules)
    Path(folder, "rules.yml").write_text(text, encoding="utf-8")
    ignore = [
        f"--no-ignore={kind}"
        for kind in ("hidden", "dot", "exclude", "global", "parent", "vcs")
    ]
    return subprocess.run(
        [program, "scan", "--json=compact", *ignore, "--rule", "rules.yml", "vllm"],
        cwd=folder,
        capture_output=True,
        check=False,
    )


def _broken_rule(folder: str, rules: list[dict[str, Any]]) -> str:
    """Which rule ast-grep cannot read, and what it says of it."""
    for rule in rules:
        done = _ast_grep(folder, [rule])
        if done.returncode not in (0, 1) or not done.stdout.startswith(b"["):
            edit = rule["id"].split("/")[0]
            return f"edit {edit} has a broken rule: {_said(done)}; mend it"
    return ""


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return one_line(done.stderr.decode(errors="replace")) or "ast-grep failed"


# What its matches mean.


def _finding(
    edit: Edit,
    files: Mapping[str, bytes],
    matches: Mapping[tuple[str, str], list[dict[str, Any]]],
    read: Read,
) -> Finding:
    source = files.get(edit.path)
    if source is None:
        return Finding(edit, State.ABSENT)

    def found(name: str, path: str = edit.path) -> list[dict[str, Any]]:
        return matches.get((path, f"{edit.id}/{name}"), [])

    scopes, faults = found("scope"), found("fault")
    cured, spoilt = _cured(edit, found)
    expected = edit.metadata["matches"]
    absent = bool(found("absent")) and not (faults or cured or spoilt)
    line = _line((faults + cured + scopes)[0]) if faults + cured + scopes else None

    def drifted(reason: str) -> Finding:
        return Finding(edit, State.DRIFTED, line=line, reason=reason)

    if not scopes and not absent:
        return drifted(f"there is no {edit.scope}")
    counts = len(faults), len(cured)
    if (counts not in ((expected, 0), (0, expected)) and not absent) or spoilt:
        return drifted(
            f"looked for {expected} x «{edit.message}», "
            f"found {len(faults)} and {len(cured)} cured"
            + (f"; {spoilt}" if spoilt else "")
        )
    try:
        tree = _parse(source)
        wrong = "" if absent else _import_fault(edit, tree, bool(cured), read)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        return drifted(f"the file does not parse: {error}")
    if wrong:
        return drifted(wrong)
    if not faults:
        return Finding(edit, State.ABSENT if absent else State.PRESENT, line=line)
    replacements = tuple(
        Replacement(
            match["replacementOffsets"]["start"],
            match["replacementOffsets"]["end"],
            match["replacement"].encode(),
        )
        for match in faults
    )
    return Finding(edit, State.NEEDED, replacements, line)


def _cured(
    edit: Edit, found: Callable[..., list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], str]:
    """Matches of the cured forms, and why some of them are no cure, if so."""
    cured, spoilt = [], ""
    for number, form in enumerate(edit.metadata["cured"]):
        here = found(f"cured-{number}")
        if here and "unless" in form:
            file = form["unless"]["file"]
            if bad := found(f"unless-{number}", file):
                spoilt = (
                    f"{file}:{_line(bad[0])} copies the reused pinned buffer "
                    "asynchronously"
                )
                continue
        cured += here
    return cured, spoilt


def _import_fault(edit: Edit, tree: ast.Module, cured: bool, read: Read) -> str:
    """What is wrong with the import that the cure needs in the file `tree`, if so."""
    line = edit.import_line
    if line is None:
        return ""
    bound = binds(tree, line, edit.path)
    if cured and not bound:
        lacks = _uses(tree, parse(line)[1])
        return f"the cure is there, but not «{line}»" if lacks else ""
    if not bound and not _offers_import(edit, line, read):
        return f"this vLLM does not offer «{line}»"
    return _module_fault(edit, line, cured, read) if edit.module else ""


def _module_fault(edit: Edit, line: str, cured: bool, read: Read) -> str:
    """What is wrong with this fork's module in the tree that `read` reads, if so."""
    module, package = module_file(line)
    # Python takes the package where both are there.
    path = module if read(package) is None else package
    there = read(path)
    if there is None:
        return f"the cure is there, but not {module}" if cured else ""
    return "" if there == edit.own(path) else f"the {path} there is not this fork's"


@functools.lru_cache(maxsize=8)
def _parse(source: bytes) -> ast.Module:
    """The tree of a file; several edits in turn are of the same one."""
    return ast.parse(source)


def _uses(tree: ast.Module, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree)
    )


def _offers_import(edit: Edit, line: str, read: Read) -> bool:
    """Whether this vLLM, or this fork, has what `line` imports."""
    return any(
        parse(line)[1] in _bound_names(text)
        for path in module_file(line)
        for text in (read(path), edit.own(path))
        if text is not None
    )


def _bound_names(source: bytes) -> set[str]:
    """Names that the module binds, wherever in it.

    Some releases bind PIN_MEMORY under `if TYPE_CHECKING` and look it up lazily.
    """
    names = set()
    for node in ast.walk(_parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name)
    return names


def _line(match: dict[str, Any]) -> int:
    return match["range"]["start"]["line"] + 1  # type: ignore[no-any-return]
