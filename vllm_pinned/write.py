# SPDX-License-Identifier: Apache-2.0
"""Writing a folder: all files or none, even when killed, and back again.

`replace_files` is one transaction. It first writes a journal with the old bytes of
every file, then the new bytes beside each file, then renames them into place, then
removes the journal. Whatever point it is killed at, `recover` puts the old bytes
back: where there is a journal, the transaction did not finish.

`apply` and `revert` are such transactions. `apply` also leaves a manifest that holds
the original files, for `revert`. Manifest and journal stay beside the metadata of an
installation, in the git directory of a checkout, or else in the root of the tree.
"""

import base64
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_pinned import __version__
from vllm_pinned.errors import BadInput
from vllm_pinned.record import edit_record, record_line, record_lines
from vllm_pinned.target import Target, inside

MANIFEST = "vllm-pinned.json"
JOURNAL = "vllm-pinned.journal"

# What reading a damaged one of them raises.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, zlib.error)

# What a new file takes of its folder's mode.
_NEW_MODE = 0o664


@contextlib.contextmanager
def locked(target: Target) -> Iterator[None]:
    """Hold the tree for this process alone, after undoing what a kill left.

    Raises:
        BadInput: the tree cannot be read or mended.

    """
    with _lock(target.path):
        recover(target)
        yield


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Make `folder` and hold it; folders that are new and stay empty go again."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            yield
    finally:
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def apply(target: Target, changes: Mapping[str, bytes], edits: list[str]) -> None:
    """Write `changes`, new bytes by path, into the folder of `target`.

    The manifest remembers `edits`, the ids of the edits that the changes make.

    Raises:
        BadInput: the folder cannot be written; it is as it was.

    """
    manifest = read_manifest(target)
    entries = manifest["files"]
    for path, after in changes.items():
        if path not in entries or not _known(target, path, entries[path]):
            # None: the file is new.
            entries[path] = {"original": _pack(target.read(path))}
        entries[path]["sha256"] = _digest(after)
    manifest["edits"] = sorted({*manifest["edits"], *edits})
    files: dict[str, bytes | None] = dict(changes)
    name, record = _state_name(target, MANIFEST), f"{target.dist_info}/RECORD"
    new = {path: changes[path] for path in _new_files(manifest) & set(changes)}

    def edited(path: str, line: bytes) -> bytes | None:
        if path == name or path in new:
            return None
        if path not in changes:
            return line
        manifest["record"].setdefault(path, line.decode())
        return record_line(path, changes[path])

    listed = target.read(record) if target.dist_info else None
    lines = None if listed is None else edit_record(listed, edited)
    text = json.dumps(manifest, indent=1).encode() + b"\n"
    files[name] = text
    if lines is not None:
        files[record] = record_lines({name: text, **new}) + lines
    replace_files(target, files)


def revert(target: Target) -> list[str]:
    """Put back the files as they were before `apply`; the paths put back.

    Raises:
        BadInput: a file was changed since, or the folder cannot be written.

    """
    manifest = read_manifest(target)
    files: dict[str, bytes | None] = {}
    for path, entry in manifest["files"].items():
        if not _known(target, path, entry):
            raise BadInput(
                f"{target.path / path} was changed after the edits were applied, "
                "so nothing was reverted; put that file back, or reinstall vLLM"
            )
        if target.read(path) != (original := _unpack(entry["original"])):
            files[path] = original
    name, record = _state_name(target, MANIFEST), f"{target.dist_info}/RECORD"
    new = _new_files(manifest)

    def original_line(path: str, line: bytes) -> bytes | None:
        if path == name or path in new:
            return None
        before = manifest["record"].get(path)
        return line if before is None else before.encode()

    if target.read(name) is not None:
        listed = target.read(record) if target.dist_info else None
        if listed is not None:
            files[record] = edit_record(listed, original_line)
        replace_files(target, {**files, name: None})
    return sorted(set(files) & set(manifest["files"]))


def read_manifest(target: Target) -> dict[str, Any]:
    """What `apply` wrote down: edits made, and each file's original and new hash.

    Empty where nothing was applied, and of a checkout in which no file is as edited
    any more: git has put the files back, or taken those of another commit.

    Raises:
        BadInput: it is damaged.

    """
    text = target.read(_state_name(target, MANIFEST))
    if text is None:
        return {"vllm-pinned": __version__, "edits": [], "files": {}, "record": {}}
    try:
        manifest: dict[str, Any] = json.loads(text)
        entries = manifest["files"].items()
        known = {path: entry for path, entry in entries if _known(target, path, entry)}
        manifest["edits"], manifest["record"]  # which it has to have, too
    except MALFORMED:
        raise BadInput(_damaged(target, MANIFEST)) from None
    if not target.dist_info and not any(
        entry["original"] and _digest(target.read(path)) == entry["sha256"]
        for path, entry in known.items()
    ):
        manifest |= {"edits": [], "files": known}
    return manifest


def _known(target: Target, path: str, entry: dict[str, Any]) -> bool:
    """Whether the file has the bytes from before `apply`, or those that it wrote."""
    original = _unpack(entry["original"])
    return _digest(target.read(path)) in (entry["sha256"], _digest(original))


def _damaged(target: Target, name: str) -> str:
    return f"{target.path / _state_name(target, name)} is damaged; reinstall vLLM"


def _new_files(manifest: dict[str, Any]) -> set[str]:
    """Paths of the files that were not there before `apply`."""
    return {p for p, entry in manifest["files"].items() if entry["original"] is None}


def _state_name(target: Target, name: str) -> str:
    """Where manifest and journal are, relative to the root of the tree."""
    if target.dist_info:
        return f"{target.dist_info}/{name}"
    git = target.path / ".git"
    return f".git/{name}" if git.is_dir() else f".{name}"


# One transaction.


def replace_files(target: Target, files: Mapping[str, bytes | None]) -> None:
    """Give every file its new bytes (None: remove it), all or none of them.

    A file keeps its mode and owner, and hard links to it elsewhere keep the old
    bytes. A link inside the tree is followed, one out of it is refused.

    Raises:
        BadInput: something cannot be written; the tree is as it was.

    """
    root = target.path
    journal = root / _state_name(target, JOURNAL)
    old = {name: target.read(name) for name in files}
    entries = {
        n: {"old": _pack(old[n]), "new": _digest(new)} for n, new in files.items()
    }
    try:
        _write(journal, json.dumps(entries).encode())
        for name, new in files.items():
            if new is not None:
                _stage(inside(root, name), new)
        for name, new in files.items():
            _settle(inside(root, name), new)
        _remove(journal)
    except BaseException as error:
        recover(target)
        if isinstance(error, OSError):
            raise BadInput(_unwritable(error, root)) from None
        raise


def recover(target: Target) -> None:
    """Undo what a killed `replace_files` left, if it left anything.

    Raises:
        BadInput: a file has bytes of neither side, or the folder cannot be written.

    """
    journal = target.path / _state_name(target, JOURNAL)
    try:
        text = target.read(_state_name(target, JOURNAL))
        if text is None:
            with contextlib.suppress(OSError):  # it is in nobody's way
                _remove(_beside(journal))
            return
        entries = _journal(target, text)
        for name, (old, new) in entries.items():
            current = target.read(name)
            if current != old and _digest(current) != new:
                raise BadInput(
                    f"{target.path / name} was changed while an interrupted run of "
                    "vllm-pinned had left it half done; reinstall vLLM"
                )
        for name, (old, _) in entries.items():
            path = inside(target.path, name)
            _remove(_beside(path))
            if target.read(name) != old:
                if old is not None:
                    _stage(path, old)
                _settle(path, old)
        _remove(journal)
    except OSError as error:
        raise BadInput(
            f"an interrupted run of vllm-pinned left {target.path} half done, and "
            f"{error.filename} cannot be written to undo it ({error.strerror}); "
            "run any command again as a user who may write there"
        ) from None


def _journal(target: Target, text: bytes) -> dict[str, tuple[bytes | None, str | None]]:
    """The old bytes of each file, and the hash of its new ones."""
    try:
        entries = json.loads(text).items()
        return {name: (_unpack(entry["old"]), entry["new"]) for name, entry in entries}
    except MALFORMED:
        raise BadInput(_damaged(target, JOURNAL)) from None


def _beside(path: Path) -> Path:
    """Where new bytes of `path` wait for their rename."""
    return path.with_name(f".{path.name}.vllm-pinned-new")


def _stage(path: Path, new: bytes) -> None:
    """Write `new` beside `path`, on the disk, with the mode and owner of `path`.

    A file that is new is readable for whom its folder is.
    """
    staged = _beside(path)
    staged.unlink(missing_ok=True)
    with staged.open("xb") as file:
        file.write(new)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        status = path.stat()
        shutil.copymode(path, staged)
    else:
        status = path.parent.stat()
        staged.chmod(status.st_mode & _NEW_MODE)
    if (status.st_uid, status.st_gid) != (os.getuid(), os.getgid()):
        with contextlib.suppress(PermissionError):
            os.chown(staged, status.st_uid, status.st_gid)


def _settle(path: Path, new: bytes | None) -> None:
    """Put the staged bytes in place, or remove the file where `new` is None."""
    if new is None:
        _remove(path)
    else:
        os.replace(_beside(path), path)
        _sync_folder(path.parent)


def _write(path: Path, new: bytes) -> None:
    _stage(path, new)
    _settle(path, new)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(error: OSError, root: Path) -> str:
    what = f"{error.filename or root}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"no room to write {what}, so nothing was changed; free some and try again"
        )
    return (
        f"cannot write {what}, so nothing was changed; "
        "run as a user who may write there, or use `vllm-pinned wheel`"
    )


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def _pack(data: bytes | None) -> str | None:
    return None if data is None else base64.b85encode(zlib.compress(data)).decode()


def _unpack(text: str | None) -> bytes | None:
    return None if text is None else zlib.decompress(base64.b85decode(text))
