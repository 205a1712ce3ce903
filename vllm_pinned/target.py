# SPDX-License-Identifier: Apache-2.0
"""What a target is: the vLLM that a command works on.

Nothing names the installed vLLM; a path names a folder (source checkout, unpacked
wheel, site-packages) or a wheel; a version names a release, which is fetched.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from vllm_pinned.errors import BadInput
from vllm_pinned.fetch import fetch

# What zipfile and the reading of what is in a wheel raise where it is damaged.
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Target:
    """A vLLM tree: a folder or a wheel.

    Attributes:
        path: The folder that holds `vllm/`, or the wheel file.
        version: Its version as its metadata says, None where it says none.
        installed: Whether it was found as the installed vLLM.
        dist_info: Name of its `vllm-X.Y.Z.dist-info`, None in a source checkout.
        read: Bytes of a file by its path (`vllm/a/b.py`), None where absent.

    """

    path: Path
    version: str | None
    installed: bool
    dist_info: str | None
    read: Callable[[str], bytes | None]

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    def __str__(self) -> str:
        version = f" {self.version}" if self.version else ""
        return f"vllm{version} in {self.path}"


def resolve(name: str | None) -> Target:
    """The target that `name`, the command's argument, names.

    Raises:
        BadInput: it names no vLLM.

    """
    if name is None:
        return _installed()
    path = Path(name)
    if name and path.is_dir():
        return _folder(path)
    if path.is_file():
        return open_wheel(path)
    try:
        version = Version(name)
    except InvalidVersion:
        raise BadInput(
            f"{name or 'an empty name'} is no file, no folder and no release; "
            "give a path, or a version such as 0.33.0"
        ) from None
    return open_wheel(fetch(version))


def _installed() -> Target:
    try:
        found = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        raise BadInput(
            "vLLM is not installed beside vllm-pinned; "
            "give its folder, a wheel or a release"
        ) from None
    return _folder(_editable(found) or Path(str(found.locate_file(""))), installed=True)


def _editable(found: metadata.Distribution) -> Path | None:
    """The checkout that an editable installation runs from."""
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))


def _folder(path: Path, installed: bool = False) -> Target:
    root = path.resolve()
    if root.name == "vllm" and (root / "version.py").is_file():
        root = root.parent
    if (
        not (root / "vllm/__init__.py").is_file()
        or not (root / "vllm/version.py").is_file()
    ):
        raise BadInput(
            f"{path} holds no vLLM; give the folder that holds vllm/ "
            "(a checkout, an unpacked wheel or site-packages)"
        )
    infos = sorted(p.name for p in root.glob("vllm-*.dist-info") if p.is_dir())
    if len(infos) > 1:
        raise BadInput(
            f"{root} holds {' and '.join(infos)}; remove those that are not installed"
        )
    info = infos[0] if infos else None
    version = _metadata_version(root / info / "METADATA") if info else None

    def read(name: str) -> bytes | None:
        return inside(root, name).read_bytes() if (root / name).is_file() else None

    return Target(
        root, version or _metadata_version(root / "PKG-INFO"), installed, info, read
    )


def inside(root: Path, name: str) -> Path:
    """The real file of `name` below `root`, which must be inside it.

    Raises:
        BadInput: a symbolic link leads out of the tree.

    """
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise BadInput(
            f"{root / name} is a link to {path}, outside the tree; "
            "install vLLM as plain files (with uv, --link-mode=copy)"
        )
    return path


def _metadata_version(path: Path) -> str | None:
    """The version that core metadata, such as METADATA, gives."""
    try:
        head = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^Version: *(\S+)", head, re.MULTILINE)
    return match[1] if match else None


def open_wheel(path: Path) -> Target:
    """The wheel at `path` as a target.

    Raises:
        BadInput: it is no wheel of vLLM, or is damaged.

    """
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename:
        raise BadInput(
            f"{path} is no wheel by its name; give vllm-X.Y.Z-....whl or a folder"
        ) from None
    if name != "vllm":
        raise BadInput(f"{path} is a wheel of {name}; give a wheel of vllm")
    try:
        archive = zipfile.ZipFile(path)
        names = set(archive.namelist())
    except PermissionError:
        raise
    except (*DAMAGED, OSError) as error:
        raise BadInput(
            f"{path} cannot be read as a wheel ({error}); remove it, download it again"
        ) from None
    infos = {n.split("/")[0] for n in names if re.match(r"vllm-[^/]+\.dist-info/", n)}
    required = {
        f"{info}/{file}" for info in infos for file in ("METADATA", "RECORD", "WHEEL")
    }
    required.add("vllm/__init__.py")
    if [*map(_info_version, infos)] != [version] or not required <= names:
        raise BadInput(
            f"{path} is no whole wheel of vLLM {version}; remove it, download it again"
        )

    def read(name: str) -> bytes | None:
        if name not in names:
            return None
        try:
            return archive.read(name)
        except (*DAMAGED, OSError) as error:
            raise BadInput(damaged(path, error)) from None

    return Target(path.absolute(), str(version), False, infos.pop(), read)


def damaged(wheel: Path, error: Exception) -> str:
    return f"{wheel} is damaged ({error}); remove it, download it again"


def _info_version(info: str) -> Version | None:
    """The version in `vllm-X.Y.Z.dist-info`."""
    try:
        return Version(info.removeprefix("vllm-").removesuffix(".dist-info"))
    except InvalidVersion:
        return None
