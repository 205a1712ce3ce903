# SPDX-License-Identifier: Apache-2.0
"""Bad input: one sentence that ends in what to do, exit 2, and nothing changed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.vllm_pinned.conftest import UNPRIVILEGED, Run, files
from vllm_pinned import write
from vllm_pinned.edits import edits_folder, load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.survey import survey

EPLB = "vllm/distributed/eplb/eplb_communicator.py"
COMMANDS = ("status", "diff", "apply", "revert")


def sentence(done) -> str:  # type: ignore[no-untyped-def]
    """What a command that refuses says, checked to be one line."""
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-pinned: ")
    return str(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_vllm(tmp_path: Path, run: Run, command: str) -> None:
    said = sentence(run(command, tmp_path))
    assert "holds no vLLM; give the folder that holds vllm/" in said
    assert not list(tmp_path.iterdir())


def test_this_fork_is_no_vllm(run: Run) -> None:
    """Its vllm/ holds edits alone."""
    assert "holds no vLLM" in sentence(run("status", Path(__file__).parents[2]))


def test_no_such_path(run: Run) -> None:
    said = sentence(run("status", "./nowhere"))
    assert "is no file, no folder and no release; give a path, or a version" in said


def test_an_empty_name(tree: Callable[[str], Path], run: Run) -> None:
    """As of a variable that is not set: not the folder that one is in."""
    root = tree("0.29.0")
    before = files(root)
    said = sentence(run("apply", "", cwd=root))
    assert "is no file, no folder and no release; give a path, or a version" in said
    assert files(root) == before


def test_a_name_that_is_too_long(run: Run) -> None:
    said = sentence(run("status", "x" * 5000))
    assert said.endswith("(File name too long); mend that path or give another")


def test_a_pipe(tmp_path: Path, run: Run) -> None:
    """A read from it would wait for ever."""
    os.mkfifo(pipe := tmp_path / "vllm-0.33.0-py3-none-any.whl")
    said = sentence(run("status", pipe, timeout=20))
    assert "is no file, no folder and no release" in said


def test_vllm_is_not_installed(run: Run) -> None:
    """As in the environment of these tests."""
    said = sentence(run("status"))
    assert "vLLM is not installed beside vllm-pinned; give its folder" in said


def test_two_versions_in_one_folder(tree: Callable[[str], Path], run: Run) -> None:
    root = tree("0.33.0")
    shutil.copytree(root / "vllm-0.33.0.dist-info", root / "vllm-0.32.0.dist-info")
    said = sentence(run("status", root))
    assert "vllm-0.32.0.dist-info and vllm-0.33.0.dist-info; remove those" in said


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_in_place_on_a_wheel(wheels: dict[str, Path], run: Run, command: str) -> None:
    said = sentence(run(command, wheels["0.33.0"]))
    assert f"{command} works on a folder in place" in said
    assert "use `vllm-pinned wheel`" in said


def test_a_wheel_from_a_folder(tree: Callable[[str], Path], run: Run) -> None:
    said = sentence(run("wheel", tree("0.33.0")))
    assert "wheel takes a release or a wheel file" in said
    assert "use `vllm-pinned apply` there" in said


def test_an_unknown_command(run: Run) -> None:
    done = run("patch")
    assert done.returncode == 2
    assert "invalid choice: 'patch'" in done.stderr


# Trees that are not as released.


@pytest.mark.parametrize("command", [*COMMANDS[:3], "series"])
def test_one_edit_has_drifted(
    tree: Callable[[str], Path], run: Run, tmp_path: Path, command: str
) -> None:
    root = tree("0.29.0")
    text = (root / EPLB).read_text()
    (root / EPLB).write_text(text.replace('tensor, device="cpu")', "tensor)"))
    before = files(root)
    done = run(command, *([tmp_path / "series"] if command == "series" else []), root)
    assert done.returncode == 2
    refused, advice = done.stderr.splitlines()
    assert "edit eplb-gloo-receive-staging has drifted in" in refused
    assert f"{EPLB}:" in refused
    assert "TorchDistGlooStagedEplbCommunicator.execute" in refused
    assert "looked for 1 x «Received expert weights are staged in pageable" in refused
    assert advice.startswith("nothing was changed; use an unchanged vLLM of")
    assert files(root) == before
    assert not (tmp_path / "series").exists()


def test_a_tree_half_edited_by_hand(tree: Callable[[str], Path], run: Run) -> None:
    """One of the three tensors is pinned, the import is there."""
    root = tree("0.33.0")
    path = root / "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
    text = path.read_text()
    half = text.replace("  self._qo_cpu,\n", "  self._qo_cpu.pin_memory(),\n")
    assert half != text
    path.write_text(half)
    before = files(root)
    done = run("apply", root)
    assert done.returncode == 2
    assert "edit sm90-sparse-mla-plan has drifted in" in done.stderr
    assert files(root) == before


def test_a_file_that_does_not_parse(tree: Callable[[str], Path], run: Run) -> None:
    root = tree("0.29.0")
    with (root / EPLB).open("a") as file:
        file.write("def (\n")
    before = files(root)
    done = run("apply", root)
    assert done.returncode == 2
    assert "has drifted" in done.stderr
    assert "does not parse" in done.stderr
    assert files(root) == before


def test_a_file_that_is_no_text(tree: Callable[[str], Path], run: Run) -> None:
    root = tree("0.29.0")
    (root / EPLB).write_bytes(b"\xff\xfe\x00 no text")
    before = files(root)
    done = run("apply", root)
    assert done.returncode == 2
    assert "edit eplb-gloo-receive-staging has drifted" in done.stderr
    assert files(root) == before


@pytest.mark.parametrize("below", ["", "vllm", EPLB])
def test_what_may_not_be_read(
    tree: Callable[[str], Path], run: Run, below: str
) -> None:
    root = tree("0.29.0")
    mode = (root / below).stat().st_mode
    (root / below).chmod(0)
    try:
        said = sentence(run("status", root, prefix=UNPRIVILEGED))
    finally:
        (root / below).chmod(mode)
    assert "cannot read " in said
    assert said.endswith("run as a user who may")


NO_STATE = (
    b"{",
    b"\xff",
    b"[]",
    b'{"edits": [], "record": {}, "files": {"vllm/version.py": {}}}',
    b'{"edits": [], "record": {}, "files": {"vllm/version.py": '
    b'{"original": "zz", "sha256": ""}}}',
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            (name, text)
            for name in (write.MANIFEST, write.JOURNAL)
            for text in NO_STATE
        ),
        (write.MANIFEST, b"{}"),  # as a journal it is whole
    ],
)
def test_a_damaged_manifest_or_journal(
    tree: Callable[[str], Path], run: Run, name: str, text: bytes
) -> None:
    root = tree("0.29.0")
    run("apply", root)
    (root / "vllm-0.29.0.dist-info" / name).write_bytes(text)
    before = files(root)
    for command in ("status", "revert"):
        said = sentence(run(command, root))
        assert f"{name} is damaged; reinstall vLLM" in said
    assert files(root) == before


# Edits that are not as they should be.


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Path]:
    """A folder with one of our edits, changed."""

    def change(**changes: object) -> Path:
        source = edits_folder() / "vllm/distributed/eplb/eplb_communicator.yml"
        document = yaml.safe_load(source.read_text()) | changes
        path = tmp_path / "vllm/x.yml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(document))
        return tmp_path

    return change


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rule": {"pattern": "("}}, "has a broken rule: .*Cannot parse.*; mend it"),
        ({"rule": {"kin": "call"}}, "has a broken rule: .*unknown field.*; mend it"),
        ({"rule": {"matches": "nothing"}}, "has a broken rule: .*; mend it"),
        ({"constraints": {"X": {"regex": "("}}}, "has a broken rule: .*; mend it"),
    ],
)
def test_a_broken_rule(
    own: Callable[..., Path], changes: dict[str, object], said: str
) -> None:
    edits = load_edits(own(**changes))
    with pytest.raises(BadInput, match=f"edit eplb-gloo-receive-staging {said}"):
        survey(lambda _: b"x = 1\n", edits)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rule": {}}, r"x\.yml is no edit: .*; mend that file"),
        ({"metadata": {}}, r"x\.yml is no edit: .*required property; mend that file"),
        ({"fixx": "y"}, r"x\.yml is no edit: .*unexpected.*; mend that file"),
        ({"language": "rust"}, r"x\.yml is no edit: .*; mend that file"),
    ],
)
def test_a_file_that_is_no_edit(
    own: Callable[..., Path], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        load_edits(own(**changes))


def test_a_file_that_is_no_yaml(own: Callable[..., Path]) -> None:
    folder = own()
    (folder / "vllm/y.yml").write_text("a: [\n")
    with pytest.raises(BadInput, match=r"y\.yml is no edit: .*; mend that file"):
        load_edits(folder)


def test_the_same_id_twice(own: Callable[..., Path]) -> None:
    folder = own()
    shutil.copy(folder / "vllm/x.yml", folder / "vllm/y.yml")
    with pytest.raises(BadInput, match=r"is also in .*; give it another id"):
        load_edits(folder)


def test_no_edits(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no edits in .*; reinstall vllm-pinned"):
        load_edits(tmp_path)
