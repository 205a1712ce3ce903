# SPDX-License-Identifier: Apache-2.0
"""apply and revert on real trees: all or nothing, and back to the exact bytes."""

import base64
import csv
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.vllm_pinned.conftest import EPLB, NOTE, NOTE_MODULE, UNPRIVILEGED, Run, files
from vllm_pinned import write
from vllm_pinned.edits import Edit, load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.survey import State, changes, survey
from vllm_pinned.target import Target, resolve

INFO = "vllm-0.29.0.dist-info"
# A file that the tree lacks.
NEW = "vllm/utils/pinned_new.py"
FEW = (
    "eplb-gloo-receive-staging",
    "sparse-mla-context-lens",
    "dense-mla-context-lens",
    "allowed-token-ids-mask",
)


@pytest.fixture
def root(tree: Callable[[str], Path]) -> Path:
    """A 0.29.0 to write to, where three files and more are edited."""
    return tree("0.29.0")


def needed(target: Target) -> dict[str, bytes]:
    """New bytes of four files that edits change, and of one that is new."""
    few = [edit for edit in load_edits() if edit.id in FEW]
    new = changes(target.read, survey(target.read, few))
    assert len(new) == 4
    return {**new, NEW: b"NEW = True\n"}


def touched(root: Path, edits: list[Edit]) -> tuple[set[str], set[str]]:
    """The files that `edits` change in `root`, and those that they bring."""
    findings = survey(resolve(str(root)).read, edits)
    found = [f.edit for f in findings if f.state is State.NEEDED]
    return {e.path for e in found}, {e.module for e in found if e.module}


def check_record(root: Path) -> None:
    """Every file of `root` stands in RECORD once, with its hash and size."""
    rows = list(csv.reader((root / INFO / "RECORD").read_text().splitlines()))
    listed = {row[0]: row[1:] for row in rows}
    assert len(listed) == len(rows)
    for name in files(root):
        digest, size = listed[name]
        if name == f"{INFO}/RECORD":
            assert (digest, size) == ("", "")
            continue
        data = (root / name).read_bytes()
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        assert digest == "sha256=" + expected.rstrip("=")
        assert size == str(len(data))


def test_apply_and_revert(root: Path, run: Run) -> None:
    (root / EPLB).chmod(0o640)
    before = files(root)
    check_record(root)
    edited, brought = touched(root, load_edits())

    assert run("apply", root).returncode == 0
    after = files(root)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == edited | {f"{INFO}/RECORD"}
    assert set(after) - set(before) == brought | {f"{INFO}/vllm-pinned.json"}
    assert {n: mode for n, (_, mode) in before.items()}.items() <= {
        n: mode for n, (_, mode) in after.items()
    }.items()
    check_record(root)

    again = run("apply", root)
    assert (again.returncode, files(root)) == (0, after)
    assert "nothing to apply" in again.stdout

    assert run("revert", root).returncode == 0
    assert files(root) == before
    again = run("revert", root)
    assert (again.returncode, files(root)) == (0, before)
    assert "nothing to revert" in again.stdout


def test_a_module_comes_and_goes_with_its_edit(
    root: Path, run: Run, fork: Path
) -> None:
    (root / NOTE).parent.chmod(0o750)
    before = files(root)
    assert run("status", root, cwd=fork).returncode == 1
    done = run("apply", root, cwd=fork)
    assert done.returncode == 0, done.stderr
    after = files(root)
    assert after[NOTE][0] == NOTE_MODULE.encode()
    assert after[NOTE][1] & 0o777 == 0o640  # as its folder
    assert b"with staging_note(tensor):" in after[EPLB][0]
    check_record(root)
    status = run("status", root, cwd=fork)
    assert (status.returncode, files(root)) == (0, after)
    assert re.search(r"vllm-pinned applied .*staging-note", status.stdout)

    done = run("revert", root, cwd=fork)
    assert NOTE in done.stdout
    assert files(root) == before


def test_a_module_on_top_of_an_older_set_of_edits(
    root: Path, run: Run, fork: Path
) -> None:
    before = files(root)
    run("apply", root)
    assert run("status", root, cwd=fork).returncode == 1
    assert run("apply", root, cwd=fork).returncode == 0
    check_record(root)
    assert NOTE in files(root)
    assert run("revert", root).returncode == 0  # the older set knows no such module
    assert files(root) == before


def test_a_module_of_the_tree_is_not_overwritten(
    root: Path, run: Run, fork: Path
) -> None:
    (root / NOTE).write_text("MINE = True\n")
    before = files(root)
    for command in ("status", "diff", "apply"):
        done = run(command, root, cwd=fork)
        assert done.returncode == 2
        refused, advice = done.stderr.splitlines()
        assert f"staging-note has drifted in {EPLB}:" in refused
        assert refused.endswith(f"the {NOTE} there is not this fork's")
        assert advice.startswith("nothing was changed; use an unchanged vLLM")
    assert files(root) == before


def test_a_newer_module_comes_after_revert(root: Path, run: Run, fork: Path) -> None:
    """What says so is the refusal."""
    before = files(root)
    run("apply", root, cwd=fork)
    (fork / NOTE).write_text(NOTE_MODULE + "# newer\n")
    done = run("apply", root, cwd=fork)
    assert done.returncode == 2
    assert "(`vllm-pinned revert` takes back what an older one applied)" in done.stderr
    assert run("revert", root, cwd=fork).returncode == 0
    assert files(root) == before
    assert run("apply", root, cwd=fork).returncode == 0
    assert files(root)[NOTE][0].endswith(b"# newer\n")


def test_a_module_that_was_there_stays(root: Path, run: Run, fork: Path) -> None:
    (root / NOTE).write_text(NOTE_MODULE)
    before = files(root)
    run("apply", root, cwd=fork)
    run("revert", root, cwd=fork)
    assert files(root) == before


def test_a_changed_module_is_not_removed(root: Path, run: Run, fork: Path) -> None:
    run("apply", root, cwd=fork)
    with (root / NOTE).open("a") as file:
        file.write("# mine\n")
    before = files(root)
    done = run("revert", root, cwd=fork)
    assert done.returncode == 2
    assert f"{NOTE} was changed after the edits were applied" in done.stderr
    assert files(root) == before


def test_revert_after_git_removed_a_module(root: Path, run: Run, fork: Path) -> None:
    """The edits are still there: only revert helps, or putting the module back."""
    before = files(root)
    run("apply", root, cwd=fork)
    (root / NOTE).unlink()
    status = run("status", root, cwd=fork)
    assert status.returncode == 2
    assert f"the cure is there, but not {NOTE}" in status.stderr
    assert run("revert", root, cwd=fork).returncode == 0
    assert files(root) == before


def test_apply_again_after_git_put_the_tree_back(
    root: Path, run: Run, fork: Path
) -> None:
    before = files(root)
    run("apply", root, cwd=fork)
    after = files(root)
    for name in before:
        if name.startswith("vllm/"):
            (root / name).write_bytes(before[name][0])
    (root / NOTE).unlink()
    run("apply", root, cwd=fork)
    assert {**files(root), f"{INFO}/RECORD": after[f"{INFO}/RECORD"]} == after
    check_record(root)
    run("revert", root, cwd=fork)
    assert files(root) == before


def test_status_says_what_was_applied(root: Path, run: Run) -> None:
    assert "not patched: needs eplb-gloo-receive-staging" in run("status", root).stdout
    run("apply", root)
    assert "patched (vllm-pinned applied " in run("status", root).stdout


def test_a_checkout_has_no_record_and_stays_clean_for_git(root: Path, run: Run) -> None:
    shutil.rmtree(root / INFO)
    subprocess.run(["git", "init", "--quiet", root], check=True)
    before = files(root / "vllm")
    assert run("apply", root).returncode == 0
    listed = subprocess.run(
        ["git", "-C", root, "status", "--porcelain", "--untracked-files=all"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "pinned" not in listed
    assert run("revert", root).returncode == 0
    assert files(root / "vllm") == before


def test_an_unversioned_source_tree(root: Path, run: Run) -> None:
    shutil.rmtree(root / INFO)
    before = files(root)
    _, brought = touched(root, load_edits())
    assert run("apply", root).returncode == 0
    assert set(files(root)) - set(before) == brought | {".vllm-pinned.json"}
    assert run("revert", root / "vllm").returncode == 0
    assert files(root) == before


def test_a_newer_set_of_edits_on_top(root: Path) -> None:
    """Edits applied in two steps are reverted in one, to the released bytes."""
    before = files(root)
    edited, brought = touched(root, load_edits())
    for edit in load_edits():
        target = resolve(str(root))
        findings = survey(target.read, [edit])
        if new := changes(target.read, findings):
            write.apply(target, new, [edit.id])
            check_record(root)
    assert set(write.revert(resolve(str(root)))) == edited | brought
    assert files(root) == before


def test_hard_links_elsewhere_keep_the_released_bytes(
    root: Path, tmp_path: Path
) -> None:
    """Uv links files from its cache, which other environments share."""
    (cache := tmp_path / "cache.py").hardlink_to(root / EPLB)
    released = cache.read_bytes()
    target = resolve(str(root))
    write.apply(target, needed(target), [])
    assert cache.read_bytes() == released != (root / EPLB).read_bytes()


def test_a_link_out_of_the_tree_is_refused(
    root: Path, tmp_path: Path, run: Run
) -> None:
    outside = tmp_path / "outside.py"
    (root / EPLB).rename(outside)
    (root / EPLB).symlink_to(outside)
    before = files(root)
    done = run("apply", root)
    assert done.returncode == 2
    assert "outside the tree; install vLLM as plain files" in done.stderr
    assert files(root) == before


def test_a_link_inside_the_tree_is_followed(root: Path, run: Run) -> None:
    real = root / "vllm/distributed/eplb/real.py"
    (root / EPLB).rename(real)
    (root / EPLB).symlink_to("real.py")
    before = files(root)
    assert run("apply", root).returncode == 0
    assert (root / EPLB).is_symlink()
    assert b"PIN_MEMORY" in real.read_bytes()
    assert run("revert", root).returncode == 0
    assert files(root) == before


def test_a_file_changed_since_is_not_overwritten(root: Path, run: Run) -> None:
    run("apply", root)
    with (root / EPLB).open("a") as file:
        file.write("# mine\n")
    before = files(root)
    done = run("revert", root)
    assert done.returncode == 2
    assert "was changed after the edits were applied" in done.stderr
    assert files(root) == before


def test_revert_after_git_put_a_file_back(root: Path, run: Run) -> None:
    before = files(root)
    run("apply", root)
    (root / EPLB).write_bytes(before[EPLB][0])
    assert run("revert", root).returncode == 0
    assert files(root)[EPLB] == before[EPLB]
    assert f"{INFO}/vllm-pinned.json" not in files(root)


def test_a_checkout_that_moved_on(
    trees: dict[str, Path], tree: Callable[[str], Path], run: Run
) -> None:
    """Git puts the edited files back and takes another release; then apply, revert."""
    root = tree("0.27.1")
    shutil.rmtree(root / "vllm-0.27.1.dist-info")
    (root / ".git").mkdir()
    released = files(root)
    assert run("apply", root).returncode == 0
    for name in released:
        shutil.copy(trees["0.30.0"] / name, root / name)
    newer = {name: state for name, state in files(root).items() if name in released}
    status = run("status", root)
    assert status.returncode == 1
    assert "vllm-pinned applied" not in status.stdout
    for _ in "12":
        done = run("apply", root)
        assert done.returncode == 0, done.stderr
        done = run("revert", root)
        assert done.returncode == 0, done.stderr
        assert files(root) == newer


def test_changes_on_top_of_edits_outlive_newer_edits(
    root: Path, run: Run, fork: Path
) -> None:
    """Revert goes back to before the last apply where nobody else could."""
    run("apply", root)
    with (root / EPLB).open("a") as file:
        file.write("# mine\n")
    mine = (root / EPLB).read_bytes()
    assert run("apply", root, cwd=fork).returncode == 0
    assert (root / EPLB).read_bytes() != mine
    assert run("revert", root).returncode == 0
    assert (root / EPLB).read_bytes() == mine


def test_a_record_of_other_tools(root: Path, run: Run) -> None:
    """Windows line ends, and a name that is no UTF-8."""
    record = root / INFO / "RECORD"
    text = record.read_bytes().replace(b"\n", b"\r\n")
    record.write_bytes(text + b"vllm/\xff.txt,,\r\nodd\r\n\r\n")
    before = files(root)
    for command in ("apply", "revert"):
        done = run(command, root)
        assert done.returncode == 0, done.stderr
    assert files(root) == before


# A kill at every step.

# The functions of write.py that write; all else only prepares.
WRITING = {
    "replace_files",
    "recover",
    "_stage",
    "_settle",
    "_write",
    "_remove",
    "_sync_folder",
}


def kill_at(line: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed before the `line`-th line that writes.

    Returns:
        Whether it was killed, False where the work has fewer lines.

    """
    child = os.fork()
    if not child:
        left = line

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            code = frame.f_code
            if code.co_filename != write.__file__ or code.co_name not in WRITING:
                return None
            if event == "line":
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def kills(work: Callable[[], object], put_back: Callable[[], None]) -> Iterator[int]:
    """Kill `work` at each line that writes, in turn, the tree put back in between."""
    line = 1
    while kill_at(line, work):
        yield line
        put_back()
        line += 1
    assert line > 100  # it was killed at all, and in the middle


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: a killed process loses nothing that it wrote."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def put(root: Path, state: dict[str, tuple[bytes, int]]) -> None:
    """Make the files of `root` those of `state`."""
    now = files(root)
    for name in set(now) - set(state):
        (root / name).unlink()
    for name, (data, mode) in state.items():
        if now.get(name) != (data, mode):
            (root / name).write_bytes(data)
            (root / name).chmod(mode)


@pytest.mark.usefixtures("fast")
def test_apply_killed_anywhere_is_undone_or_done(root: Path) -> None:
    before = files(root)
    target = resolve(str(root))
    new = needed(target)

    def work() -> None:
        with write.locked(target):
            write.apply(target, new, ["eplb-gloo-receive-staging"])

    work()
    after = files(root)
    put(root, before)
    seen = set()
    for line in kills(work, lambda: put(root, before)):
        with write.locked(target):
            state = files(root)
        assert state in (before, after), line
        seen.add(state == after)
        work()  # and the next apply completes it
        assert files(root) == after, line
    assert seen == {False, True}


@pytest.mark.usefixtures("fast")
def test_revert_killed_anywhere_is_undone_or_done(root: Path) -> None:
    before = files(root)
    target = resolve(str(root))
    new = needed(target)
    with write.locked(target):
        write.apply(target, new, ["eplb-gloo-receive-staging"])
    after = files(root)

    def work() -> None:
        with write.locked(target):
            write.revert(target)

    for line in kills(work, lambda: put(root, after)):
        with write.locked(target):
            state = files(root)
        assert state in (before, after), line
        work()
        assert files(root) == before, line


@pytest.mark.usefixtures("fast")
def test_a_recovery_killed_anywhere_is_recovered(root: Path) -> None:
    before = files(root)
    target = resolve(str(root))
    new = needed(target)
    line = 0
    # The last state in which everything is renamed and the journal still there.
    journal = root / INFO / write.JOURNAL
    half = before
    while kill_at(line := line + 1, lambda: write.apply(target, new, [])):
        if journal.exists():
            half = files(root)
        put(root, before)
    put(root, half)
    for at in kills(lambda: write.recover(target), lambda: put(root, half)):
        write.recover(target)
        assert files(root) == before, at


def test_a_killed_command_leaves_what_the_next_mends(root: Path, run: Run) -> None:
    """The same through the command: what a kill leaves, status undoes."""
    before = files(root)
    target = resolve(str(root))
    new = needed(target)
    line = 1
    while True:
        assert kill_at(line, lambda: write.apply(target, new, []))
        if files(root)[EPLB] != before[EPLB]:
            break  # one of the files is renamed into place
        put(root, before)
        line += 5
    assert len({files(root)[n] == before[n] for n in set(new) & set(before)}) == 2
    status = run("status", root)
    assert status.returncode == 1, status.stderr
    assert files(root) == before


def test_a_half_done_file_changed_by_hand_is_refused(root: Path, run: Run) -> None:
    before = files(root)
    target = resolve(str(root))
    new = needed(target)
    line = 1
    while files(root)[EPLB] == before[EPLB]:
        put(root, before)
        kill_at(line := line + 5, lambda: write.apply(target, new, []))
    with (root / EPLB).open("a") as file:
        file.write("# mine\n")
    half = files(root)
    done = run("apply", root)
    assert done.returncode == 2
    assert "was changed while an interrupted run" in done.stderr
    assert files(root) == half


# What cannot be written.


def test_a_read_only_folder(root: Path, run: Run) -> None:
    before = files(root)
    folders = [root, *(p for p in root.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = run("apply", root, prefix=UNPRIVILEGED)
        assert run("status", root, prefix=UNPRIVILEGED).returncode == 1
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 2
    assert "Permission denied, so nothing was changed; run as a user who" in done.stderr
    assert files(root) == before


def test_a_full_disk(root: Path) -> None:
    """A limit on the size of a file ends a write in the middle, as a full disk does."""
    before = files(root)
    target = resolve(str(root))
    new = needed(target)
    # Each file as it is would fit, the largest does not once it is edited.
    limit = max(len(before[name][0]) for name in set(new) & set(before))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(
            BadInput, match=r"no room to write .*; free some and try again"
        ):
            write.apply(target, new, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert files(root) == before


def test_a_full_temporary_folder(root: Path, run: Run) -> None:
    before = files(root)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))

    done = run("apply", root, preexec_fn=limit)
    assert done.returncode == 2, done.stderr
    assert "cannot write temporary files" in done.stderr
    assert files(root) == before


def test_no_temporary_folder(root: Path, run: Run) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = run("status", root, preexec_fn=limit)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot write temporary files" in line
    assert line.endswith("free some room, or set TMPDIR to another folder")


def test_no_room_for_the_rules_alone() -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, old[1]))
    try:
        with pytest.raises(BadInput, match="cannot write temporary files"):
            survey(lambda _: b"x = 1\n", load_edits())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.fixture
def read_only(root: Path, tmp_path: Path) -> Iterator[Path]:
    """The tree on a disk that takes no write, as in the layers of an image."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for command in (["--bind", root, disk], ["-o", "remount,bind,ro", disk]):
        done = subprocess.run(["mount", *command], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("needs a user who may mount a disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_read_only_disk(read_only: Path, run: Run) -> None:
    assert run("status", read_only).returncode == 1
    assert run("diff", read_only).returncode == 1
    done = run("apply", read_only)
    assert done.returncode == 2
    assert "Read-only file system, so nothing was changed" in done.stderr


def test_a_disk_that_fills_up(root: Path, tmp_path: Path, run: Run) -> None:
    """The real thing, where this user may mount a small disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("needs a user who may mount a disk")
    try:
        small = disk / "vllm"
        shutil.copytree(root, small)
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(b"x" * max(free - 100_000, 0))
        before = files(small)
        done = run("apply", small)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "no room to write" in done.stderr
        assert files(small) == before
        (disk / "filler").unlink()
        assert run("apply", small).returncode == 0
    finally:
        subprocess.run(["umount", disk], check=True)


def test_two_at_once(root: Path) -> None:
    """Two commands on one tree wait for each other."""
    command = [sys.executable, "-m", "vllm_pinned", "apply", str(root)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in "12"]
    said = sorted(process.communicate()[0][:7] for process in both)
    assert said == ["applied", "nothing"]
    check_record(root)
