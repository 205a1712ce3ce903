# SPDX-License-Identifier: Apache-2.0
"""RECORD, the list of files with hash and size, of an installation or a wheel.

Its lines are `path,algorithm=digest,size`, the digest in URL-safe base64 without
padding; the line of RECORD itself has neither (PEP 376, PEP 427, PEP 627).
"""

import base64
import csv
import hashlib
import io
from collections.abc import Callable, Mapping


def digest_text(digest: bytes) -> str:
    """A digest as RECORD writes it."""
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def record_line(path: str, data: bytes) -> bytes:
    """The line for a file, without its end."""
    digest = digest_text(hashlib.sha256(data).digest())
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow((path, f"sha256={digest}", len(data)))
    return line.getvalue().encode()


def record_lines(files: Mapping[str, bytes]) -> bytes:
    """The lines for `files`, bytes by path, with their ends."""
    return b"".join(record_line(*item) + b"\n" for item in sorted(files.items()))


def edit_record(record: bytes, new_line: Callable[[str, bytes], bytes | None]) -> bytes:
    """`record` with each line replaced by what `new_line` gives for it.

    `new_line` gets the path and the line without its end, and gives the new line
    without its end, or None to drop it. Line ends stay.
    """
    result = []
    for line in record.splitlines(keepends=True):
        content = line.rstrip(b"\r\n")
        new = new_line(_path(content), content)
        if new is not None:
            result.append(new + line[len(content) :])
    return b"".join(result)


def record_hashes(record: bytes) -> dict[str, str]:
    """`algorithm=digest` by path; empty where a file has none."""
    rows = csv.reader(record.decode().splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}


def _path(content: bytes) -> str:
    text = content.decode(errors="surrogateescape")
    return next(iter(next(csv.reader([text]), [])), "")
