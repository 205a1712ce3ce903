# SPDX-License-Identifier: Apache-2.0
"""Every affected release as released: states, edits, and what they touch."""

import ast
import difflib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm_pinned.conftest import RELEASES, Run, defined
from vllm_pinned.edits import Edit
from vllm_pinned.show import diff
from vllm_pinned.survey import State, changes, survey
from vllm_pinned.target import resolve

# Which releases need, have or lack which edit: the table of the design.
_OLD = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0")
STATES = {
    edit: {release: (old if release in _OLD else new) for release in RELEASES}
    for edit, old, new in (
        ("eplb-gloo-receive-staging", State.NEEDED, State.PRESENT),
        ("sparse-mla-context-lens", State.NEEDED, State.PRESENT),
        ("dense-mla-context-lens", State.NEEDED, State.PRESENT),
        ("allowed-token-ids-mask", State.NEEDED, State.NEEDED),
        ("flashinfer-dcp-prefill-plan", State.NEEDED, State.NEEDED),
        ("flashinfer-prefill-plan", State.NEEDED, State.NEEDED),
        ("flashinfer-cascade-plan", State.NEEDED, State.NEEDED),
        ("flashinfer-decode-plan", State.NEEDED, State.NEEDED),
        ("sm90-sparse-mla-plan", State.ABSENT, State.NEEDED),
        ("sm90-sparse-mla-plan-guard", State.ABSENT, State.NEEDED),
        ("step5-prefill-chunks", State.ABSENT, State.ABSENT),
        ("step5-prefill-plan", State.ABSENT, State.ABSENT),
        ("flash-attn-mm-prefix-ranges", State.ABSENT, State.NEEDED),
        ("flashinfer-paged-kv-buffers", State.NEEDED, State.PRESENT),
        ("pipeline-input-prep-event", State.NEEDED, State.NEEDED),
        ("drafter-backup-tokens", State.NEEDED, State.NEEDED),
        ("extract-hidden-states-backup-tokens", State.NEEDED, State.NEEDED),
        ("grammar-bitmask-copy", State.NEEDED, State.NEEDED),
        ("num-computed-tokens-copy", State.NEEDED, State.NEEDED),
        ("mrope-positions-copy", State.NEEDED, State.PRESENT),
        ("xdrope-positions-copy", State.NEEDED, State.ABSENT),
        ("pruned-mrope-positions", State.NEEDED, State.NEEDED),
        ("multimodal-inputs-copy", State.NEEDED, State.PRESENT),
        ("cohere-compass-position-ids", State.ABSENT, State.NEEDED),
        ("cohere-compass-pruning-positions", State.ABSENT, State.NEEDED),
        ("dots3-note-position-ids", State.ABSENT, State.NEEDED),
        ("dots3-note-sequence-bounds", State.ABSENT, State.NEEDED),
        ("h2d-race-check", State.NEEDED, State.NEEDED),
        ("h2d-race-check-variables", State.NEEDED, State.NEEDED),
    )
}
# vLLM 0.32.0 dropped cascade attention on FlashInfer.
for release in ("0.32.0", "0.33.0"):
    STATES["flashinfer-cascade-plan"][release] = State.ABSENT
for release in ("0.28.0", "0.29.0"):
    STATES["flash-attn-mm-prefix-ranges"][release] = State.NEEDED
STATES["flashinfer-paged-kv-buffers"]["0.29.0"] = State.PRESENT
for release in ("0.28.0", "0.29.0"):
    STATES["mrope-positions-copy"][release] = State.PRESENT
STATES["xdrope-positions-copy"]["0.29.0"] = State.PRESENT
# Before vLLM 0.29.0, dots3's vision tower made them on the GPU.
for edit in ("dots3-note-position-ids", "dots3-note-sequence-bounds"):
    STATES[edit]["0.29.0"] = State.NEEDED
# vLLM 0.33.0 is the first that has Step5.
for edit in ("step5-prefill-chunks", "step5-prefill-plan"):
    STATES[edit]["0.33.0"] = State.NEEDED

RUN_RUFF = (sys.executable, "-m", "ruff")

# Ruff settings of vLLM's pyproject.toml that concern the edited files.
RUFF = """
[lint]
select = ["E", "F", "UP", "B", "ISC", "SIM", "I", "G"]
ignore = ["F405", "F403", "E731", "B905", "B007", "UP032", "UP042"]
isort.known-first-party = ["vllm"]
"""


def test_every_edit_is_in_the_table(edits: list[Edit]) -> None:
    assert {edit.id for edit in edits} == set(STATES)


@pytest.mark.parametrize("release", RELEASES)
def test_states(trees: dict[str, Path], edits: list[Edit], release: str) -> None:
    findings = survey(resolve(str(trees[release])).read, edits)
    assert {f.edit.id: f.state for f in findings} == {
        edit: states[release] for edit, states in STATES.items()
    }


@pytest.mark.parametrize("release", RELEASES)
def test_a_wheel_has_the_states_of_its_tree(
    wheels: dict[str, Path], edits: list[Edit], release: str
) -> None:
    findings = survey(resolve(str(wheels[release])).read, edits)
    assert {f.edit.id: f.state for f in findings} == {
        edit: states[release] for edit, states in STATES.items()
    }


@pytest.mark.parametrize("release", RELEASES)
def test_apply_leaves_nothing_needed(
    tree: Callable[[str], Path], run: Run, release: str
) -> None:
    root = tree(release)
    assert run("status", root).returncode == 1
    done = run("apply", root)
    assert done.returncode == 0, done.stderr
    status = run("status", root)
    assert status.returncode == 0, status.stdout + status.stderr
    assert "needed" not in status.stdout
    for edit in (e for e in STATES if STATES[e][release] is State.NEEDED):
        assert re.search(rf"{edit} .* present ", status.stdout)


@pytest.mark.parametrize("release", RELEASES)
def test_edited_files_compile_and_stay_clean(
    trees: dict[str, Path], edits: list[Edit], release: str, tmp_path: Path
) -> None:
    """What ruff says of a file, with vLLM's settings, the edits do not change."""
    target = resolve(str(trees[release]))
    for path, after in changes(target.read, survey(target.read, edits)).items():
        compile(after, path, "exec")
        settings = tmp_path / "ruff.toml"
        settings.write_text(RUFF)
        before = _ruff(target.read(path) or b"", settings)
        # This one is formatted as an older ruff does.
        assert not before or path == "vllm/multimodal/inputs.py"
        assert _complaints(_ruff(after, settings)) <= _complaints(before)


def _complaints(said: str) -> set[str]:
    """Of what ruff says, all but the lines around those that it would change."""
    return {line for line in said.splitlines() if not line.startswith((" ", "@@"))}


def _ruff(text: bytes, settings: Path) -> str:
    """What ruff complains of, empty if nothing."""
    said = []
    for command in (["format", "--diff"], ["check", "--no-fix", "--quiet"]):
        done = subprocess.run(
            [*RUN_RUFF, *command, "--config", settings, "--stdin-filename=x.py", "-"],
            input=text,
            capture_output=True,
            check=False,
        )
        said.append(done.stdout.decode() if done.returncode else "")
    return "".join(said)


@pytest.mark.parametrize("release", RELEASES)
def test_only_the_scopes_and_an_import_change(
    trees: dict[str, Path], edits: list[Edit], release: str
) -> None:
    target = resolve(str(trees[release]))
    for path, after in changes(target.read, survey(target.read, edits)).items():
        before = target.read(path)
        if before is None:  # a module of the fork's own
            assert {e.own(path) for e in edits if e.module == path} == {after}
            continue
        allowed = {
            line
            for edit in edits
            if edit.path == path and STATES[edit.id][release] is State.NEEDED
            for line in _lines_of(after, edit.scope, edit.import_line or "")
        }
        matcher = difflib.SequenceMatcher(
            None, before.splitlines(), after.splitlines(), autojunk=False
        )
        for tag, _, _, start, end in matcher.get_opcodes():
            if tag != "equal":
                assert set(range(start + 1, end + 1)) <= allowed


def _lines_of(source: bytes, scope: str, imported: str) -> set[int]:
    """1-based lines of the scope and of the statement that imports."""
    module = ast.parse(source)
    nodes: list[ast.AST] = [
        node
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module in imported.split()
    ]
    inner: list[ast.AST] = [module]
    for name in scope.split("."):
        inner = [
            node
            for outer in inner
            for node in ast.walk(outer)
            if defined(node) == name and node is not outer
        ]
    assert inner
    return {
        line
        for node in nodes + inner
        for line in range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("release", RELEASES)
def test_git_apply_of_the_diff_equals_apply(
    tree: Callable[[str], Path], run: Run, edits: list[Edit], release: str
) -> None:
    root = tree(release)
    target = resolve(str(root))
    expected = changes(target.read, survey(target.read, edits))
    printed = run("diff", root)
    assert printed.returncode == 1, printed.stderr
    assert printed.stdout.encode() == diff(target.read, expected)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(
        ["git", "apply"], cwd=root, check=True, input=printed.stdout, text=True
    )
    assert {path: (root / path).read_bytes() for path in expected} == expected
    after = run("diff", root)
    assert (after.returncode, after.stdout) == (0, "")


def test_the_readme_has_the_table(edits: list[Edit]) -> None:
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    assert readme_table() in readme


def readme_table() -> str:
    """The README's table of releases and edits."""
    columns = [r for r in RELEASES if r != "0.27.0"]
    rows = [
        "| edit | " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for edit, states in STATES.items():
        assert states["0.27.0"] is states["0.27.1"]  # one column for both
        rows.append(f"| `{edit}` | " + " | ".join(states[r] for r in columns) + " |")
    rows[0] = rows[0].replace("0.27.1", "0.27.0, 0.27.1")
    return "\n".join(rows)
