# SPDX-License-Identifier: Apache-2.0
"""Reading edits: the ast-grep rules under `vllm/`, one YAML document an edit.

`vllm/a/b.yml` edits `vllm/a/b.py`. `edit.schema.json` beside this module says what
an edit holds. A `vllm/a/c.py` beside the edits is a module of this fork's own, which
goes into a vLLM as it is, along with the edits that import it.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from vllm_pinned.errors import BadInput, one_line
from vllm_pinned.imports import module_file

# Keys of an edit that are ast-grep's own, passed on as they are.
RULE_KEYS = ("rule", "constraints", "utils", "transform", "rewriters")


@dataclass(frozen=True)
class Edit:
    """One edit: the fault, its cure, and how each is recognised.

    Attributes:
        id: Name of the edit, unique among all edits.
        path: The file it edits, relative to the root of a vLLM tree, with `/`.
        source: The YAML file it comes from.
        document: The ast-grep rule as read, `metadata` included.

    """

    id: str
    path: str
    source: Path
    document: dict[str, Any]

    @property
    def metadata(self) -> dict[str, Any]:
        return self.document["metadata"]  # type: ignore[no-any-return]

    @property
    def scope(self) -> str:
        """`Class.method` (or `Class`) that the fault must be inside."""
        return self.metadata["scope"]  # type: ignore[no-any-return]

    @property
    def message(self) -> str:
        return self.document["message"]  # type: ignore[no-any-return]

    @property
    def regression(self) -> str:
        """The test that fails without the edit, relative to the root, with `/`."""
        return self.metadata["regression"]  # type: ignore[no-any-return]

    @property
    def title(self) -> str:
        return self.metadata["title"]  # type: ignore[no-any-return]

    @property
    def import_line(self) -> str | None:
        """The import that the cure needs, None where it needs none."""
        return self.metadata.get("import")

    @property
    def module(self) -> str | None:
        """This fork's own module that the cure imports; None where vLLM has it."""
        path = module_file(self.import_line)[0] if self.import_line else None
        return path if path and self.own(path) is not None else None

    def own(self, path: str) -> bytes | None:
        """Bytes of this fork's own file at `path`, as in a tree; None if none."""
        file = self.source.parents[self.path.count("/")] / path
        return file.read_bytes() if file.is_file() else None


def edits_folder() -> Path:
    """The folder whose `vllm/` holds the edits: the package's own, or the checkout."""
    package = Path(__file__).parent
    packed = package / "edits"
    return packed if packed.is_dir() else package.parent


@functools.cache
def schema() -> dict[str, Any]:
    text = resources.files("vllm_pinned").joinpath("edit.schema.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]


def load_edits(folder: Path | None = None) -> list[Edit]:
    """Read every edit below `folder`/vllm, in the order of their files.

    Args:
        folder: Where `vllm/` with the edits is; this fork's own if None.

    Raises:
        BadInput: a file is no YAML, misses a field, or names an id twice.

    """
    folder = folder or edits_folder()
    edits: dict[str, Edit] = {}
    for source in sorted(folder.glob("vllm/**/*.yml")):
        path = source.relative_to(folder).with_suffix(".py").as_posix()
        for document in _documents(source):
            edit = Edit(document["id"], path, source, document)
            if edit.id in edits:
                raise BadInput(
                    f"{source}: edit {edit.id} is also in {edits[edit.id].source}; "
                    "give it another id"
                )
            edits[edit.id] = edit
    if not edits:
        raise BadInput(f"no edits in {folder / 'vllm'}; reinstall vllm-pinned")
    return list(edits.values())


def _documents(source: Path) -> list[dict[str, Any]]:
    try:
        documents = list(yaml.safe_load_all(source.read_text(encoding="utf-8")))
        for document in documents:
            jsonschema.validate(document, schema())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(
            f"{source} is no edit: {one_line(error)}; mend that file"
        ) from None
    except jsonschema.ValidationError as error:
        raise BadInput(
            f"{source} is no edit: {error.json_path}: {error.message}; mend that file"
        ) from None
    return documents
