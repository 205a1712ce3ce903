# SPDX-License-Identifier: Apache-2.0
"""Real vLLM releases as trees, and the command to run on them."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_pinned.edits import Edit, load_edits
from vllm_pinned.fetch import fetch

RELEASES = (
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)

# This fork: the tool, the edits, and their regressions.
ROOT = Path(__file__).parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]


def defined(node: ast.AST) -> str | None:
    """The name of a definition, or of a variable where it is assigned."""
    target = getattr(node, "target", None) if isinstance(node, ast.AnnAssign) else None
    return getattr(node, "name", getattr(target, "id", None))


# Root may read and write anything; a command behind this may not.
UNPRIVILEGED: tuple[str, ...] = ()
if os.getuid() == 0:
    UNPRIVILEGED = (
        "setpriv",
        "--bounding-set=-dac_override,-dac_read_search",
        "--inh-caps=-all",
    )

# This process's environment, without the virtual environment that it runs in.
OUTSIDE = {name: v for name, v in os.environ.items() if name != "VIRTUAL_ENV"}


def must(*command: object, env: dict[str, str] = OUTSIDE) -> str:
    """What a command prints, which has to succeed."""
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def make_env(folder: Path, *requirements: object) -> Path:
    """A new virtual environment, with pip, that has `requirements`; its Python."""
    uv, python = (sys.executable, "-m", "uv"), folder / "bin/python"
    must(*uv, "venv", "--seed", "--python", sys.executable, folder)
    must(*uv, "pip", "install", "--python", python, *requirements)
    return python


# One more edit, of the statement that eplb-gloo-receive-staging edits in part, with a
# module of the fork's own.
NOTE = "vllm/utils/staging_note.py"
NOTE_MODULE = """\
# SPDX-License-Identifier: Apache-2.0
import contextlib


@contextlib.contextmanager
def staging_note(tensor):
    yield
"""
NOTE_TEST = "tests/utils/test_staging_note.py"
NOTE_EDIT = """\
id: staging-note
language: python
severity: error
message: The staging is not noted
rule:
  kind: expression_statement
  all:
    - pattern: $STATEMENT
    - has: {stopBy: end, pattern: {context: "torch.empty_like($TENSOR, $$$)"}}
    - not: {matches: noted}
utils:
  noted:
    inside:
      stopBy: end
      kind: with_statement
      has: {kind: with_clause, regex: ^staging_note}
fix: |-
  # Noted for as long as it is made.
  with staging_note($TENSOR):
      $STATEMENT
metadata:
  kind: B
  scope: TorchDistGlooStagedEplbCommunicator.execute
  matches: 1
  cured:
    - rule:
        kind: call
        all:
          - pattern: {context: "torch.empty_like($$$)"}
          - matches: noted
    - rule: {kind: call, pattern: {context: "note_elsewhere($$$)"}}
  absent:
    rule:
      kind: class_definition
      has: {field: name, regex: ^TorchDistGlooStagedEplbCommunicator$}
      not: {has: {stopBy: end, regex: ^torch.empty_like$}}
  import: from vllm.utils.staging_note import staging_note
  regression: tests/utils/test_staging_note.py
  title: "[Core] Note the staging of weights received over Gloo"
  body: The staging is noted.
  references:
    - https://example.org/
  drop_when: Never.
"""
EPLB = "vllm/distributed/eplb/eplb_communicator.py"


def write_fork(folder: Path) -> Path:
    """A copy of this fork that has the edit above and its module too."""
    folder.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("vllm_pinned", "vllm", "tests"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name, text in (
        (NOTE, NOTE_MODULE),
        (NOTE_TEST, "def test_note():\n    pass\n"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with (folder / EPLB).with_suffix(".yml").open("a") as file:
        file.write("---\n" + NOTE_EDIT)
    return folder


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A fork of this fork: `run(..., cwd=fork)` is its command."""
    return write_fork(tmp_path / "fork")


@pytest.fixture(scope="session")
def edits() -> list[Edit]:
    return load_edits()


@pytest.fixture(scope="session")
def wheels() -> dict[str, Path]:
    """Every affected release that PyPI has, as downloaded."""
    return {release: fetch(Version(release)) for release in RELEASES}


@pytest.fixture(scope="session")
def trees(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The Python files and metadata of each release; not to be written to."""
    result = {}
    for release, wheel in wheels.items():
        root = tmp_path_factory.mktemp(f"vllm-{release}")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [
                n for n in archive.namelist() if n.endswith(".py") or "dist-info/" in n
            ]
            archive.extractall(root, wanted)
        result[release] = root
    return result


@pytest.fixture
def tree(trees: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A small copy of a release to write to: the edited files and the metadata."""

    def copy(release: str) -> Path:
        source, root = trees[release], tmp_path / f"vllm-{release}"
        names = {edit.path for edit in load_edits()}
        names |= {"vllm/__init__.py", "vllm/version.py", "vllm/utils/torch_utils.py"}
        for name in names:
            if (source / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / name, root / name)
        (info,) = source.glob("vllm-*.dist-info")
        shutil.copytree(info, root / info.name)
        record = root / info.name / "RECORD"
        lines = record.read_text().splitlines(keepends=True)
        record.write_text(
            "".join(ln for ln in lines if (root / ln.split(",")[0]).exists())
        )
        return root

    return copy


@pytest.fixture
def run() -> Run:
    """Runs `vllm-pinned` as a user does, in a process of its own."""

    def run(
        *arguments: object, prefix: tuple[str, ...] = (), **options: object
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **options.pop("env", {})}  # type: ignore[dict-item]
        return subprocess.run(
            [*prefix, sys.executable, "-m", "vllm_pinned", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            **options,  # type: ignore[call-overload]
        )

    return run


def files(root: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and mode of every file below `root`."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
