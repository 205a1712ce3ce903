# SPDX-License-Identifier: Apache-2.0
"""The control script's own judgement: what it calls vacuous, and its mutations."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.vllm_pinned.conftest import Run
from vllm_pinned.edits import load_edits

SCRIPT = Path(__file__).parents[1] / "controls/run.py"
control = SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="control"))

PASSED = control.Outcome("passed")
SKIPPED = control.Outcome("skipped")
NO_MODULE = control.Outcome("skipped", "could not import 'vllm.utils.new': No module")
FAULT = control.Outcome("failed", "RuntimeError: ... the CPU tensor is not pinned")
OTHER = control.Outcome("failed", "ImportError: no module named vllm")


@pytest.mark.parametrize(
    ("name", "guards", "before", "after", "ill"),
    [
        ("test_pinned_x", True, FAULT, PASSED, ""),
        ("test_pinned_x", True, PASSED, PASSED, "vacuous: passes unpatched"),
        ("test_pinned_x", True, OTHER, PASSED, "unpatched it fails for another reason"),
        ("test_pinned_x", True, FAULT, FAULT, "fails patched"),
        ("test_pinned_x", True, SKIPPED, SKIPPED, ""),
        ("test_pinned_x", True, SKIPPED, PASSED, "skipped on one tree only"),
        ("test_x", True, SKIPPED, PASSED, "skipped on one tree only"),
        ("test_x", True, NO_MODULE, PASSED, ""),
        ("test_x", False, NO_MODULE, PASSED, "skipped on one tree only"),
        ("test_pinned_x", True, NO_MODULE, PASSED, "skipped on one tree only"),
        ("test_pinned_x", False, PASSED, PASSED, ""),
        ("test_pinned_x", False, FAULT, PASSED, "fails, but the trees are alike"),
        ("test_x", True, PASSED, PASSED, ""),
        ("test_x", True, PASSED, FAULT, "fails patched"),
    ],
)
def test_verdicts(
    name: str, guards: bool, before: object, after: object, ill: str
) -> None:
    assert control.verdict(name, guards, before, after) == ill


@pytest.mark.parametrize(
    ("name", "changed", "found"),
    [
        ("test_pinned_x", ["-copy(one)", "+copy(two)"], True),
        ("test_pinned_x", [], False),
        ("test_pinned_x[mrope-cuda]", ["+self.mrope_positions.gpu[row, :n]"], True),
        ("test_pinned_x[xdrope-cuda]", ["+self.mrope_positions.gpu[row, :n]"], False),
        ("test_pinned_x[mrope-cuda]", ["+self.mrope_positions.cpu = buffer"], False),
        ("test_pinned_mrope_x[cuda]", ["+self.mrope_positions.cpu = buffer"], True),
    ],
)
def test_which_tests_an_edit_is_guarded_by(
    name: str, changed: list[str], found: bool
) -> None:
    assert control.has_edit(name, changed) is found


def test_it_knows_every_edited_file_and_regression() -> None:
    edits = load_edits()
    of_the_guard = "utils/test_plan_workspaces.py"  # which several edits bring
    regressions = dict(control.REGRESSIONS)
    assert control.FLASHINFER in regressions.pop(of_the_guard)
    assert {f"tests/{name}" for name in regressions} == {
        edit.regression for edit in edits
    }
    for name, paths in regressions.items():
        guarded = {edit.path for edit in edits if edit.regression == f"tests/{name}"}
        assert set(paths) == guarded


def test_every_mutation_has_a_place(
    tree: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    """In a patched release that needs the edit which the mutation spoils."""
    placed = set()
    for release in ("0.29.0", "0.30.0", "0.33.0"):
        patched = tree(release)
        sync_check = patched / control.SYNC_CHECK
        sync_check.parent.mkdir(exist_ok=True)
        sync_check.write_text('mode = ""\nmode == "error"\n')
        assert run("apply", patched).returncode == 0
        for number, mutation in enumerate(control.MUTATIONS):
            root = tmp_path / f"{release}-{number}"
            root.mkdir()
            before = {path: (patched / path) for path in mutation.changes}
            texts = {p: f.read_text() for p, f in before.items() if f.exists()}
            if control.mutate(patched, mutation, root):
                placed.add(mutation.name)
                assert any(
                    (root / path).read_text() != text for path, text in texts.items()
                )
            # The patched tree, whose files are linked, stays as it was.
            assert {p: before[p].read_text() for p in texts} == texts
    assert placed == {mutation.name for mutation in control.MUTATIONS}


def run_control(
    folder: Path, tests: dict[str, str], trees: dict[str, dict[str, str]], *args: str
) -> subprocess.CompletedProcess[str]:
    """Run the script in `folder`, on `tests` and two `trees` of the files given."""
    script = folder / "tests/controls/run.py"
    files = {script: SCRIPT.read_text()}
    files |= {folder / "tests" / name: text for name, text in tests.items()}
    for tree, texts in trees.items():
        files |= {folder / tree / path: text for path, text in texts.items()}
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    roots = [folder / tree for tree in trees]
    return subprocess.run(
        [*map(str, (sys.executable, script, *roots, *args))],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_vacuous_regression_fails_the_command(tmp_path: Path) -> None:
    """End to end on a tree whose only difference means nothing."""
    names = [file for file in control.REGRESSIONS if file.startswith("models/")]
    names.append("distributed/test_eplb_gloo_staging.py")
    done = run_control(
        tmp_path,
        dict.fromkeys(names, "def test_pinned_nothing():\n    pass\n"),
        {
            tree: dict.fromkeys(("vllm/__init__.py", control.EPLB), text)
            for tree, text in (("unpatched", ""), ("patched", "# as it was\n"))
        },
        "eplb",
        "models",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{len(names)} passed; 1 complaints" in done.stdout
    assert "test_pinned_nothing: vacuous: passes unpatched" in done.stdout


def test_mutations_are_caught_or_complained_of(tmp_path: Path) -> None:
    """End to end, by a regression that looks for the pinning and for nothing else."""
    regression = (
        "from pathlib import Path\n"
        "import vllm\n"
        "def test_pinned_staging():\n"
        f"    edited = Path(vllm.__file__).parents[1] / {control.EPLB!r}\n"
        "    assert 'pin_memory' in edited.read_text(), 'not pinned'\n"
    )
    copy = "dst_tensor.copy_(cpu_tensor, non_blocking=True)\n"
    staging = 'torch.empty_like(tensor, device="cpu"{})\n'
    done = run_control(
        tmp_path,
        {"distributed/test_eplb_gloo_staging.py": regression},
        {
            tree: {"vllm/__init__.py": "", control.EPLB: staging.format(pinned) + copy}
            for tree, pinned in (
                ("unpatched", ""),
                ("patched", ", pin_memory=PIN_MEMORY"),
            )
        },
        "eplb",
        "--mutations",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    said = {
        line.strip().split("  ")[0]: line.split("  ")[-1].strip()
        for line in done.stdout.splitlines()
        if line.startswith("  EPLB: ") and "not caught" not in line
    }
    assert said == {
        # Its scratch is pinned as well: no such regression can tell.
        "EPLB: a reused pinned scratch": "NOT CAUGHT",
        "EPLB: the copies are allowed to synchronise": "test_pinned_staging",
        "EPLB: the copies are synchronous": "NOT CAUGHT",
    }
    assert "patched: 1 passed; 2 complaints" in done.stdout


def test_a_mutation_may_be_for_regressions_that_were_not_given(tmp_path: Path) -> None:
    """Then it is no complaint that those given do not catch it."""
    texts = {"vllm/__init__.py": "", control.MODEL_RUNNER: "max_concurrent_batches > 1"}
    done = run_control(
        tmp_path,
        {"v1/worker/test_num_computed_tokens_copy.py": "def test_x():\n    pass\n"},
        {"unpatched": texts, "patched": texts},
        "computed",
        "--mutations",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two batches in flight  " in done.stdout
    assert "not by the regressions given" in done.stdout
