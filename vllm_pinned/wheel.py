# SPDX-License-Identifier: Apache-2.0
"""Packing a wheel: the released one with edited files, new ones and its own version.

What is not edited is copied as it is, compressed bytes and all; each entry is read
once to check it against RECORD.
"""

import contextlib
import copy
import hashlib
import os
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from packaging.version import Version

from vllm_pinned import __version__
from vllm_pinned.errors import BadInput
from vllm_pinned.record import (
    digest_text,
    edit_record,
    record_hashes,
    record_line,
    record_lines,
)
from vllm_pinned.target import DAMAGED, Target, damaged
from vllm_pinned.write import output_folder

CHUNK = 1 << 20

# Hashes that RECORD may have (PEP 427: sha256 or better).
ALGORITHMS = ("sha256", "sha384", "sha512")

# Fixed part of a local file header, and where in it the lengths of what follows it
# stand (APPNOTE.TXT of the ZIP format, 4.3.7).
_LOCAL_HEADER_SIZE = 30
_LOCAL_LENGTHS = struct.Struct("<HH")
_LOCAL_LENGTHS_AT = 26
_SIZES_FOLLOW_DATA = 0x08


def pinned_version(released: str) -> str:
    """The version of the edited wheel: `X.Y.Z+pinned.N`, after a local part if any.

    An older `pinned.N` is replaced.
    """
    version = Version(released)
    local = re.sub(r"(^|\.)pinned\.[\d.]+$", "", version.local or "")
    return f"{version.public}+{local}{local and '.'}pinned.{__version__}"


def pack(
    target: Target, changes: Mapping[str, bytes], diff: bytes, folder: Path
) -> tuple[Path, Path]:
    """Write the wheel of `target` with `changes`, new bytes by path, into `folder`.

    Returns:
        The paths of the wheel and, beside it, of `diff`. Both appear whole, or not
        at all.

    Raises:
        BadInput: the released wheel is damaged, or `folder` cannot be written.

    """
    assert target.dist_info is not None  # every wheel has one
    released = target.dist_info.removeprefix("vllm-").removesuffix(".dist-info")
    old_stem, new_stem = f"vllm-{released}", f"vllm-{pinned_version(released)}"
    tags = target.path.name.split("-", 2)[2]
    results = folder / f"{new_stem}-{tags}", folder / f"{new_stem}.diff"
    parts = [path.with_name(f".{path.name}.part") for path in results]
    try:
        with output_folder(folder), _removed(parts):
            parts[1].write_bytes(diff)
            with parts[0].open("wb") as out:
                _write(target.path, out, changes, old_stem, new_stem)
            for part, result in zip(parts, results, strict=True):
                os.replace(part, result)
    except OSError as error:
        raise BadInput(
            f"cannot write {results[0]} ({error.strerror}); "
            "free some room, or give another folder with --out"
        ) from None
    except DAMAGED as error:
        raise BadInput(damaged(target.path, error)) from None
    return results


@contextlib.contextmanager
def _removed(parts: Iterable[Path]) -> Iterator[None]:
    """Remove `parts` at the end, those that are still there."""
    try:
        yield
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def _write(
    source: Path,
    out: BinaryIO,
    changes: Mapping[str, bytes],
    old_stem: str,
    new_stem: str,
) -> None:
    """Write the wheel `source` to `out`, its version `old_stem` made `new_stem`."""
    dist_info = f"{old_stem}.dist-info"
    with (
        source.open("rb") as raw,
        zipfile.ZipFile(raw) as old,
        zipfile.ZipFile(out, "w") as new,
    ):
        record = old.read(f"{dist_info}/RECORD")
        metadata = old.read(f"{dist_info}/METADATA")
        version = new_stem.removeprefix("vllm-").encode()
        edited = {
            **changes,
            f"{dist_info}/METADATA": re.sub(
                rb"(?m)^(Version: *)\S+", rb"\g<1>" + version, metadata, count=1
            ),
        }
        hashes = record_hashes(record)

        def new_line(path: str, line: bytes) -> bytes:
            name = _renamed(path, old_stem, new_stem)
            if path in edited:
                return record_line(name, edited[path])
            return line.replace(path.encode(), name.encode(), 1)

        added = {path: changes[path] for path in set(changes) - set(old.namelist())}
        record = record_lines(added) + edit_record(record, new_line)
        for info in old.infolist():
            name = _renamed(info.filename, old_stem, new_stem)
            if info.filename == f"{dist_info}/RECORD":
                for path, data in sorted(added.items()):
                    _add(new, old.getinfo("vllm/__init__.py"), path, data)
                _add(new, info, name, record)
                continue
            _check(old, info, hashes)
            if info.filename in edited:
                _add(new, info, name, edited[info.filename])
            else:
                _copy(raw, new, info, name)


def _renamed(name: str, old_stem: str, new_stem: str) -> str:
    """`name` with the version in `vllm-X.Y.Z.dist-info/` and `.data/` replaced."""
    for suffix in (".dist-info/", ".data/"):
        if name.startswith(old_stem + suffix):
            return new_stem + name.removeprefix(old_stem)
    return name


def _check(
    old: zipfile.ZipFile, info: zipfile.ZipInfo, hashes: Mapping[str, str]
) -> None:
    """Raise BadZipFile unless the entry has the hash that RECORD gives."""
    if info.is_dir():
        return
    algorithm, _, expected = hashes.get(info.filename, "").partition("=")
    if algorithm not in ALGORITHMS:
        raise zipfile.BadZipFile(f"{info.filename} has no hash in RECORD")
    digest = hashlib.new(algorithm)
    with old.open(info) as entry:
        while chunk := entry.read(CHUNK):
            digest.update(chunk)
    if digest_text(digest.digest()) != expected:
        raise zipfile.BadZipFile(f"{info.filename} is not what RECORD says")


def _add(new: zipfile.ZipFile, like: zipfile.ZipInfo, name: str, data: bytes) -> None:
    """Add an entry with the time, mode and compression of `like`."""
    info = zipfile.ZipInfo(name, like.date_time)
    info.external_attr = like.external_attr
    info.create_system = like.create_system
    new.writestr(info, data, like.compress_type)


def _copy(
    raw: BinaryIO, new: zipfile.ZipFile, info: zipfile.ZipInfo, name: str
) -> None:
    """Add an entry by copying its compressed bytes from `raw`, the released wheel."""
    raw.seek(info.header_offset + _LOCAL_LENGTHS_AT)
    lengths = _LOCAL_LENGTHS.unpack(raw.read(_LOCAL_LENGTHS.size))
    raw.seek(info.header_offset + _LOCAL_HEADER_SIZE + sum(lengths))
    entry = copy.copy(info)
    entry.filename = name
    entry.flag_bits &= ~_SIZES_FOLLOW_DATA
    out = new.fp
    assert out is not None  # open for writing
    out.seek(new.start_dir)
    entry.header_offset = out.tell()
    out.write(entry.FileHeader())
    left = info.compress_size
    while left:
        chunk = raw.read(min(left, CHUNK))
        if not chunk:
            raise EOFError(f"{info.filename} is cut short")
        out.write(chunk)
        left -= len(chunk)
    new.start_dir = out.tell()
    new.filelist.append(entry)
    new.NameToInfo[name] = entry
