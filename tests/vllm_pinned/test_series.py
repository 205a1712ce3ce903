# SPDX-License-Identifier: Apache-2.0
"""Mail patches on git checkouts of the released source distributions."""

import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from unearth import PackageFinder

from tests.vllm_pinned.conftest import ROOT, Run, files
from vllm_pinned.edits import load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.fetch import finders, pip_settings
from vllm_pinned.show import write_series
from vllm_pinned.survey import State, changes, survey
from vllm_pinned.target import resolve

SOURCES = ("0.29.0", "0.33.0")
AUTHOR = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "user.name",
    "GIT_CONFIG_VALUE_0": "Zoë O'Hara, PhD",
    "GIT_CONFIG_KEY_1": "user.email",
    "GIT_CONFIG_VALUE_1": "zoe@example.org",
}
SIGNED = "Signed-off-by: Zoë O'Hara, PhD <zoe@example.org>"


@pytest.fixture(scope="session")
def checkouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The Python sources of a release under git, as a contributor has them."""
    result = {}
    for release in SOURCES:
        root = tmp_path_factory.mktemp(f"source-{release}") / "vllm"
        _unpack(release, root)
        _git(root, "init", "--quiet")
        _git(root, "add", "vllm")
        _git(root, "commit", "--quiet", "--message", f"vLLM {release}")
        result[release] = root
    return result


def _unpack(release: str, root: Path) -> None:
    for finder in finders(pip_settings()):
        for package in finder.find_all_packages("vllm"):
            if package.version == release and not package.link.is_wheel:
                assert isinstance(finder, PackageFinder)
                finder.download_and_unpack(package.link, root, root.parent)
                return
    raise AssertionError(f"no source distribution of vLLM {release}")


def _git(root: Path, *arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(params=["this fork", "with an edit that nests"])
def home(request: pytest.FixtureRequest) -> Path:
    """Where the edits are."""
    return ROOT if request.param == "this fork" else request.getfixturevalue("fork")


@pytest.mark.parametrize("release", SOURCES)
def test_git_am_of_the_series_equals_apply(
    checkouts: dict[str, Path], run: Run, tmp_path: Path, home: Path, release: str
) -> None:
    root, folder = checkouts[release], tmp_path / "series"
    target = resolve(str(root))
    findings = survey(target.read, load_edits(home))
    expected = changes(target.read, findings)
    needed = [f.edit for f in findings if f.state is State.NEEDED]

    done = run("series", folder, root, env=AUTHOR, cwd=home)
    assert done.returncode == 0, done.stderr
    patches = sorted(folder.iterdir())
    assert len(patches) == len(needed) > 0
    base = _git(root, "rev-parse", "HEAD")
    try:
        _git(root, "am", "--keep-non-patch", *map(str, patches))
        assert {path: (root / path).read_bytes() for path in expected} == expected
        tests = {edit.regression for edit in needed}
        changed = set(_git(root, "diff", "--name-only", base).split())
        assert changed == set(expected) | tests
        for test in tests:
            assert (root / test).read_bytes() == (home / test).read_bytes()
        log = _git(
            root, "log", "--reverse", "--format=%an <%ae>%x00%B%x01", f"{base}.."
        )
        commits = [
            text.strip().split("\0") for text in log.split("\x01") if text.strip()
        ]
        for edit, (author, message) in zip(needed, commits, strict=True):
            assert author == "Zoë O'Hara, PhD <zoe@example.org>"
            title, empty, *body = message.splitlines()
            assert (title, empty) == (edit.title, "")
            assert max(map(len, body)) <= 88
            assert body[-1] == SIGNED
            for url in edit.metadata["references"]:
                assert f"See: {url}" in body
        assert run("status", root, cwd=home).returncode == 0
    finally:
        _git(root, "am", "--abort", check=False)
        _git(root, "reset", "--quiet", "--hard", base)


@pytest.mark.parametrize("release", SOURCES)
def test_each_patch_makes_one_edit(
    checkouts: dict[str, Path], run: Run, tmp_path: Path, home: Path, release: str
) -> None:
    """On top of those before it; and what a patch needs of the fork's own, it brings."""
    root, folder = checkouts[release], tmp_path / "series"

    def states() -> dict[str, State]:
        found = survey(resolve(str(root)).read, load_edits(home))
        return {f.edit.id: f.state for f in found}

    expected = states()
    needed = [edit for edit, state in expected.items() if state is State.NEEDED]
    run("series", folder, root, env=AUTHOR, cwd=home)
    patches = sorted(folder.iterdir())
    for patch, edit in zip(patches, needed, strict=True):
        _git(root, "apply", str(patch))
        expected[edit] = State.PRESENT
        assert states() == expected
    for patch in reversed(patches):
        _git(root, "apply", "--reverse", str(patch))
    assert _git(root, "status", "--porcelain", "vllm") == ""


def test_apply_on_a_checkout_is_seen_by_git_as_edits_alone(
    checkouts: dict[str, Path], run: Run
) -> None:
    root = checkouts["0.29.0"]
    target = resolve(str(root))
    new = changes(target.read, survey(target.read, load_edits()))
    expected = {("M" if (root / path).exists() else "??", path) for path in new}
    assert run("apply", root).returncode == 0
    listed = _git(root, "status", "--porcelain", "--untracked-files=all", "vllm")
    assert {tuple(line.split()) for line in listed.splitlines()} == expected
    assert run("revert", root).returncode == 0
    assert _git(root, "status", "--porcelain", "vllm") == ""


def test_nothing_needed_writes_nothing(
    tree: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    root = tree("0.33.0")
    run("apply", root)
    done = run("series", tmp_path / "series", root, env=AUTHOR)
    assert (done.returncode, (tmp_path / "series").exists()) == (0, False)
    assert "needs no edit" in done.stdout


def test_no_author(tree: Callable[[str], Path], run: Run, tmp_path: Path) -> None:
    nobody = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    done = run(
        *("series", tmp_path / "series", tree("0.33.0")), env=nobody, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "git has no user.name to sign off with; run `git config" in done.stderr
    assert not (tmp_path / "series").exists()


def test_an_author_in_a_plain_locale(
    tree: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder = tmp_path / "series"
    done = run("series", folder, tree("0.33.0"), env=AUTHOR | ascii_only)
    assert done.returncode == 0, done.stderr
    for patch in folder.iterdir():
        assert SIGNED in patch.read_text()


def test_a_folder_with_patches(
    tree: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    (tmp_path / "0001-mine.patch").write_text("mine\n")
    root = tree("0.33.0")
    done = run("series", tmp_path, root, env=AUTHOR)
    assert done.returncode == 2
    assert "holds patches already; give an empty folder" in done.stderr
    assert files(tmp_path / root.name)  # untouched, beside the patch
    assert [path.name for path in tmp_path.glob("*.patch")] == ["0001-mine.patch"]


def test_a_file_where_the_folder_should_be(
    tree: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine\n")
    root = tree("0.33.0")
    for folder in ("file", "file/below"):
        done = run("series", tmp_path / folder, root, env=AUTHOR)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.endswith("; give another folder")
    assert (tmp_path / "file").read_text() == "mine\n"


def test_no_room_for_a_series(tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, old[1]))
    try:
        with pytest.raises(BadInput, match=r"cannot write to .*; give another folder"):
            write_series(tmp_path / "series", {"1.patch": b"a", "2.patch": b"bb"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not list(tmp_path.iterdir())
