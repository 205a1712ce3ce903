# SPDX-License-Identifier: Apache-2.0
"""What a survey makes of a tree beyond one edit: absence, nesting, own modules.

The edit in question is the one more of the `fork` fixture: it nests with
`eplb-gloo-receive-staging`, brings a module, and says when it is absent.
"""

import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.vllm_pinned.conftest import EPLB, NOTE, NOTE_EDIT, NOTE_MODULE
from vllm_pinned.edits import Edit, load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.survey import Finding, Read, State, changes, survey

PINNING = {"vllm/utils/torch_utils.py": "PIN_MEMORY = True\n"}
BARE = """\
    import torch


    class TorchDistGlooStagedEplbCommunicator:
        def execute(self, tensors):
            for tensor in tensors:
                host = torch.empty_like(tensor, device="cpu")
                tensor.copy_(host, non_blocking=True)
    """
PINNED = """\
    import torch

    from vllm.utils.torch_utils import PIN_MEMORY


    class TorchDistGlooStagedEplbCommunicator:
        def execute(self, tensors):
            for tensor in tensors:
                host = torch.empty_like(
                    tensor, device="cpu", pin_memory=PIN_MEMORY
                )
                tensor.copy_(host, non_blocking=True)
    """
NOTED = """\
    import torch

    from vllm.utils.staging_note import staging_note


    class TorchDistGlooStagedEplbCommunicator:
        def execute(self, tensors):
            for tensor in tensors:
                # Noted for as long as it is made.
                with staging_note(tensor):
                    host = torch.empty_like(tensor, device="cpu")
                tensor.copy_(host, non_blocking=True)
    """
BOTH = """\
    import torch

    from vllm.utils.staging_note import staging_note
    from vllm.utils.torch_utils import PIN_MEMORY


    class TorchDistGlooStagedEplbCommunicator:
        def execute(self, tensors):
            for tensor in tensors:
                # Noted for as long as it is made.
                with staging_note(tensor):
                    host = torch.empty_like(
                        tensor, device="cpu", pin_memory=PIN_MEMORY
                    )
                tensor.copy_(host, non_blocking=True)
    """


@pytest.fixture
def own(fork: Path) -> Callable[..., list[Edit]]:
    """The edits of the Gloo communicator, in the order of `ids`."""
    edits = {edit.id: edit for edit in load_edits(fork)}
    return lambda *ids: [edits[i] for i in ids or ("staging-note",)]


def reader(source: str, others: dict[str, str] | None = None) -> Read:
    tree = {**PINNING, EPLB: textwrap.dedent(source), **(others or {})}
    return lambda path: tree[path].encode() if path in tree else None


def look(edits: list[Edit], source: str, **others: str) -> Finding:
    (finding,) = survey(reader(source, others), edits)
    return finding


# Absent by what the file says.


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (("torch.empty_like(", "self.staging("), State.ABSENT),
        (("def execute", "def run"), State.DRIFTED),  # but not without its scope
        (("class TorchDistGlooStaged", "class TorchDistNccl"), State.DRIFTED),
        (("torch.empty_like", "torch.empty_like.of"), State.DRIFTED),
        (("cpu", "cpu"), State.NEEDED),
        (("", "class ("), State.DRIFTED),  # does not parse
    ],
)
def test_absent_is_what_the_file_says(
    own: Callable[..., list[Edit]], change: tuple[str, str], state: State
) -> None:
    source = textwrap.dedent(BARE).replace(*change, 1)
    assert look(own(), source).state is state


@pytest.mark.parametrize("source", ["", "import torch\n", '"""Text."""\n'])
def test_a_file_that_says_nothing_is_no_absence(
    own: Callable[..., list[Edit]], source: str
) -> None:
    finding = look(own(), source)
    assert finding.state is State.DRIFTED
    assert finding.reason == "there is no TorchDistGlooStagedEplbCommunicator.execute"


def test_absent_without_its_scope(own: Callable[..., list[Edit]]) -> None:
    source = "class TorchDistGlooStagedEplbCommunicator:\n    pass\n"
    assert look(own(), source).state is State.ABSENT
    assert look(own("eplb-gloo-receive-staging"), source).state is State.DRIFTED
    assert look(own(), source + "x = (\n").state is State.DRIFTED


@pytest.mark.parametrize(
    ("source", "state"), [(BARE, State.NEEDED), (NOTED, State.PRESENT)]
)
def test_a_fault_or_a_cure_is_no_absence(
    own: Callable[..., list[Edit]], source: str, state: State
) -> None:
    """Also where the rule matches, here in a class of the same name inside another."""
    other = (
        "class Other:\n    class TorchDistGlooStagedEplbCommunicator:\n        pass\n"
    )
    text = f"{textwrap.dedent(source)}\n\n{other}"
    assert look(own(), text, **{NOTE: NOTE_MODULE}).state is state
    twice = text.replace("copy_(host", "copy_(torch.empty_like(host, device='cpu')")
    assert look(own(), twice, **{NOTE: NOTE_MODULE}).state is State.DRIFTED


def test_what_is_absent_is_left_alone(own: Callable[..., list[Edit]]) -> None:
    read = reader(BARE.replace("torch.empty_like(", "self.staging("))
    assert changes(read, survey(read, own())) == {}


# Edits of the same bytes.


@pytest.mark.parametrize("order", [1, -1])
def test_edits_that_nest(own: Callable[..., list[Edit]], order: int) -> None:
    """Either one first, and on top of either one alone."""
    edits = own(*("eplb-gloo-receive-staging", "staging-note")[::order])
    for source in (BARE, PINNED, NOTED):
        read = reader(source, {NOTE: NOTE_MODULE})
        new = changes(read, survey(read, edits))
        assert new == {EPLB: textwrap.dedent(BOTH).encode()}
    read = reader(BOTH, {NOTE: NOTE_MODULE})
    assert changes(read, survey(read, edits)) == {}


def test_edits_that_nest_keep_line_ends(own: Callable[..., list[Edit]]) -> None:
    read = reader(textwrap.dedent(BARE).replace("\n", "\r\n"))
    new = changes(read, survey(read, own("eplb-gloo-receive-staging", "staging-note")))
    assert new[EPLB].decode() == textwrap.dedent(BOTH).replace("\n", "\r\n")


def test_edits_that_exclude_each_other(
    own: Callable[..., list[Edit]], fork: Path
) -> None:
    """The first takes away what the second looks for."""
    document = yaml.safe_load(NOTE_EDIT)
    document["id"] = "staging-gone"
    document["fix"] = "host = note_elsewhere(tensor)"
    other = fork / "vllm/distributed/eplb/eplb_communicator.yml"
    other.write_text(yaml.safe_dump_all([document, *yaml.safe_load_all(_text(other))]))
    edits = {edit.id: edit for edit in load_edits(fork)}
    both = [edits["staging-gone"], edits["eplb-gloo-receive-staging"]]
    read = reader(BARE)
    with pytest.raises(
        BadInput,
        match=f"edit eplb-gloo-receive-staging is drifted in {EPLB} after staging-gone "
        r"was made; mend the rule in .*eplb_communicator\.yml",
    ):
        changes(read, survey(read, both))


def _text(path: Path) -> str:
    return path.read_text()


# Modules that come with the edits.


def test_a_module_is_brought_where_the_tree_lacks_it(
    own: Callable[..., list[Edit]],
) -> None:
    expected = {EPLB: textwrap.dedent(NOTED).encode(), NOTE: NOTE_MODULE.encode()}
    read = reader(BARE)
    assert changes(read, survey(read, own())) == expected
    read = reader(BARE, {NOTE: NOTE_MODULE})
    del expected[NOTE]
    assert changes(read, survey(read, own())) == expected


@pytest.mark.parametrize("source", [BARE, NOTED])
@pytest.mark.parametrize(
    ("path", "text"),
    [
        (NOTE, NOTE_MODULE + "\n"),
        (NOTE, NOTE_MODULE.replace("\n", "\r\n")),
        (NOTE, ""),
        ("vllm/utils/staging_note/__init__.py", NOTE_MODULE),  # Python takes this one
    ],
)
def test_another_module_of_that_name_is_drift(
    own: Callable[..., list[Edit]], source: str, path: str, text: str
) -> None:
    finding = look(own(), source, **{NOTE: NOTE_MODULE, path: text})
    assert finding.state is State.DRIFTED
    assert finding.reason == f"the {path} there is not this fork's"


def test_a_cure_without_its_module_is_drift(own: Callable[..., list[Edit]]) -> None:
    finding = look(own(), NOTED)
    assert finding.state is State.DRIFTED
    assert finding.reason == f"the cure is there, but not {NOTE}"


def test_a_cure_without_its_import_is_drift(own: Callable[..., list[Edit]]) -> None:
    source = NOTED.replace("from vllm.utils.staging_note", "from elsewhere")
    finding = look(own(), source, **{NOTE: NOTE_MODULE})
    assert finding.state is State.DRIFTED
    assert "the cure is there, but not «from vllm.utils.staging_note" in finding.reason


def test_another_cure_needs_no_module(own: Callable[..., list[Edit]]) -> None:
    """Nor does it care for a module of that name."""
    source = BARE.replace("torch.empty_like(tensor", "note_elsewhere(tensor")
    assert look(own(), source).state is State.PRESENT
    assert look(own(), source, **{NOTE: "x = 1\n"}).state is State.PRESENT


def test_a_module_without_the_name_is_refused(fork: Path) -> None:
    (fork / NOTE).write_text("x = 1\n")
    (edit,) = (e for e in load_edits(fork) if e.id == "staging-note")
    finding = look([edit], BARE)
    assert finding.state is State.DRIFTED
    assert "does not offer «from vllm.utils.staging_note" in finding.reason


def test_vllm_itself_may_bring_the_module(fork: Path) -> None:
    """The fork no longer brings it: it is vLLM's, whatever its bytes."""
    (fork / NOTE).unlink()
    (edit,) = (e for e in load_edits(fork) if e.id == "staging-note")
    assert look([edit], BARE).state is State.DRIFTED
    module = "def staging_note(tensor):\n    pass\n"
    assert look([edit], BARE, **{NOTE: module}).state is State.NEEDED
    assert look([edit], NOTED, **{NOTE: module}).state is State.PRESENT


def test_a_configuration_of_ast_grep_around_is_not_read(
    own: Callable[..., list[Edit]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder may be below a project that uses ast-grep."""
    (tmp_path / "sgconfig.yml").write_text(
        "ruleDirs: [rules]\nlanguageGlobs: {html: ['*.py']}\n"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert look(own(), BARE).state is State.NEEDED
