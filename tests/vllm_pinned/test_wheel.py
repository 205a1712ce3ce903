# SPDX-License-Identifier: Apache-2.0
"""The patched wheel: what is in it, and that installers take it."""

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from tests.vllm_pinned.conftest import OUTSIDE, Run, make_env, must
from vllm_pinned import __version__, wheel
from vllm_pinned.edits import load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.record import record_lines
from vllm_pinned.survey import changes, survey
from vllm_pinned.target import resolve

BOTH_ENDS = ("0.26.0", "0.33.0")


@pytest.fixture(scope="session")
def packed(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The patched wheel of a release, made once by the command."""
    made: dict[str, Path] = {}

    def pack(release: str) -> Path:
        if release not in made:
            out = tmp_path_factory.mktemp("out")
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "vllm_pinned", "wheel"),
                    *(release, "--out", str(out)),
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            names = sorted(path.name for path in out.iterdir())
            assert done.stdout.split() == [str(out / name) for name in names]
            made[release] = out / names[0]
        return made[release]

    return pack


@pytest.mark.parametrize("release", BOTH_ENDS)
def test_only_edited_entries_differ(
    wheels: dict[str, Path], packed: Callable[[str], Path], release: str
) -> None:
    target = resolve(str(wheels[release]))
    new = changes(target.read, survey(target.read, load_edits()))
    version = f"{release}+pinned.{__version__}"
    old_info, new_info = f"vllm-{release}.dist-info", f"vllm-{version}.dist-info"
    with (
        zipfile.ZipFile(wheels[release]) as released,
        zipfile.ZipFile(packed(release)) as ours,
    ):
        assert ours.testzip() is None
        brought = sorted(set(new) - set(released.namelist()))
        *others, record = (n.replace(old_info, new_info) for n in released.namelist())
        assert ours.namelist() == [*others, *brought, record]
        differ = set(brought)
        for before in released.infolist():
            after = ours.getinfo(before.filename.replace(old_info, new_info))
            assert before.external_attr == after.external_attr
            assert before.date_time == after.date_time
            if (before.CRC, before.file_size) != (after.CRC, after.file_size):
                differ.add(before.filename)
        assert differ == set(new) | {f"{old_info}/METADATA", f"{old_info}/RECORD"}
        for path, text in new.items():
            assert ours.read(path) == text
        metadata = released.read(f"{old_info}/METADATA").decode()
        assert ours.read(f"{new_info}/METADATA").decode() == metadata.replace(
            f"\nVersion: {release}\n", f"\nVersion: {version}\n", 1
        )


@pytest.mark.parametrize("release", BOTH_ENDS)
def test_record_is_right_for_every_entry(
    packed: Callable[[str], Path], release: str
) -> None:
    with zipfile.ZipFile(packed(release)) as ours:
        (record,) = (n for n in ours.namelist() if n.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(ours.read(record).decode().splitlines()))
        assert [row[0] for row in rows].count(record) == 1
        assert {row[0] for row in rows} == set(ours.namelist())
        for name, digest, size in rows:
            if name == record:
                assert (digest, size) == ("", "")
                continue
            with ours.open(name) as entry:
                found = hashlib.file_digest(entry, "sha256").digest()  # type: ignore[arg-type]
            text = base64.urlsafe_b64encode(found).decode().rstrip("=")
            assert (digest, size) == (
                f"sha256={text}",
                str(ours.getinfo(name).file_size),
            )


def test_the_same_wheel_twice(packed: Callable[[str], Path], tmp_path: Path) -> None:
    target = resolve("0.33.0")
    new = changes(target.read, survey(target.read, load_edits()))
    again, _ = wheel.pack(target, new, b"", tmp_path)
    first = packed("0.33.0")
    assert again.name == first.name
    with again.open("rb") as one, first.open("rb") as two:
        assert (
            hashlib.file_digest(one, "sha256").digest()
            == hashlib.file_digest(two, "sha256").digest()
        )


def test_the_version(packed: Callable[[str], Path]) -> None:
    name, version, _, _ = parse_wheel_filename(packed("0.33.0").name)
    assert (name, str(version)) == ("vllm", f"0.33.0+pinned.{__version__}")
    assert version in Requirement("vllm==0.33.0").specifier
    ours = f"pinned.{__version__}"
    for released, expected in (
        ("0.33.0+cu129", f"0.33.0+cu129.{ours}"),
        ("0.33.0+pinned.1", f"0.33.0+{ours}"),
        ("0.33.0+cu129.pinned.1", f"0.33.0+cu129.{ours}"),
    ):
        assert wheel.pinned_version(released) == expected


def test_the_diff_beside_it(packed: Callable[[str], Path], run: Run) -> None:
    path = packed("0.33.0")
    (patch,) = path.parent.glob("*.diff")
    assert patch.name == f"vllm-0.33.0+pinned.{__version__}.diff"
    assert patch.read_text() == run("diff", "0.33.0").stdout


def test_a_patched_wheel_needs_nothing(
    packed: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    path = packed("0.33.0")
    status = run("status", path)
    assert status.returncode == 0
    assert "patched (built by `vllm-pinned wheel`)" in status.stdout
    done = run("wheel", path, "--out", tmp_path / "out")
    assert (done.returncode, (tmp_path / "out").exists()) == (0, False)
    assert "needs no edit" in done.stdout


def test_it_installs_and_says_what_it_is(
    packed: Callable[[str], Path], tmp_path: Path
) -> None:
    """The whole of vLLM is installed: pip and its own command see a good installation."""
    python = make_env(tmp_path / "env", "vllm==0.33.0")
    must(python, "-m", "pip", "install", "--no-deps", packed("0.33.0"))
    version = f"0.33.0+pinned.{__version__}"
    assert f"Version: {version}\n" in must(python, "-m", "pip", "show", "vllm")
    assert "No broken requirements" in must(python, "-m", "pip", "check")
    assert "satisfied" in must(
        python, "-m", "pip", "install", "--no-deps", "--dry-run", "vllm==0.33.0"
    )
    command = (python, "-m", "vllm.entrypoints.cli.main", "--version")
    # Without a GPU vLLM's command has to be told what it is for.
    cpu = {} if Path("/dev/nvidiactl").exists() else {"VLLM_TARGET_DEVICE": "cpu"}
    assert must(*command, env=OUTSIDE | cpu).splitlines()[-1] == version
    shutil.rmtree(tmp_path / "env")  # 9 GB


# What is no good wheel.


def test_a_truncated_wheel(wheels: dict[str, Path], run: Run, tmp_path: Path) -> None:
    bad = tmp_path / wheels["0.33.0"].name
    with wheels["0.33.0"].open("rb") as file:
        bad.write_bytes(file.read(1_000_000))
    for command in ("status", "diff", "wheel"):
        done = run(command, bad, cwd=tmp_path)
        assert done.returncode == 2
        assert "cannot be read as a wheel" in done.stderr
        assert done.stderr.rstrip().endswith("download it again")
    assert [path.name for path in tmp_path.iterdir()] == [bad.name]


def test_a_damaged_wheel(wheels: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """One bit in the middle of an entry that is not edited."""
    bad = tmp_path / wheels["0.26.0"].name
    shutil.copy(wheels["0.26.0"], bad)
    with bad.open("r+b") as file:
        file.seek(bad.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    done = run("wheel", bad, "--out", tmp_path / "out/below")
    assert done.returncode == 2, done.stdout
    assert "is damaged (" in done.stderr
    assert done.stderr.rstrip().endswith("download it again")
    assert not (tmp_path / "out").exists()


def small_wheel(path: Path, entries: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in entries.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize(
    ("name", "entries", "said"),
    [
        ("vllm-0.33.0-py3-none-any.whl", None, "cannot be read as a wheel"),
        ("vllm-0.33.0-py3-none-any.whl", {"x": ""}, "is no whole wheel of vLLM"),
        (
            "vllm-0.33.0-py3-none-any.whl",
            {"vllm/__init__.py": "", "vllm-0.33.0.dist-info/METADATA": ""},
            "is no whole wheel of vLLM",
        ),
        ("torch-2.11.0-py3-none-any.whl", {"x": ""}, "is a wheel of torch"),
        ("vllm.zip", {"x": ""}, "is no wheel by its name"),
        ("vllm-0.33.0.tar.gz", None, "is no wheel by its name"),
    ],
)
def test_no_wheel_of_vllm(
    tmp_path: Path, run: Run, name: str, entries: dict[str, str] | None, said: str
) -> None:
    path = tmp_path / name
    if entries is None:
        path.write_text("not a zip\n")
    else:
        small_wheel(path, entries)
    done = run("wheel", path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]


INFO = "vllm-0.33.0.dist-info"
SMALL = {
    "vllm/__init__.py": "",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\n",
}
NAME = "vllm-0.33.0-py3-none-any.whl"


def whole_wheel(path: Path, entries: dict[str, str] = SMALL) -> Path:
    """A small wheel at `path` that has RECORD."""
    listed = record_lines({name: text.encode() for name, text in entries.items()})
    (info,) = {name.split("/")[0] for name in entries if ".dist-info/" in name}
    record = {f"{info}/RECORD": f"{listed.decode()}{info}/RECORD,,\n"}
    return small_wheel(path, {**entries, **record})


def test_new_files(tmp_path: Path) -> None:
    """They come last but for RECORD, with the date and mode of others, in any order."""
    path = whole_wheel(tmp_path / NAME)
    new = {"vllm/b.py": b"b = 1\n" * 99, "vllm/a.py": b"a = 1\n"}
    one, _ = wheel.pack(resolve(str(path)), new, b"", tmp_path / "1")
    two, _ = wheel.pack(
        resolve(str(path)), dict(reversed(new.items())), b"", tmp_path / "2"
    )
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as archive:
        *_, first, second, last = archive.infolist()
        assert (first.filename, second.filename) == ("vllm/a.py", "vllm/b.py")
        assert last.filename.endswith(".dist-info/RECORD")
        like = archive.getinfo("vllm/__init__.py")
        for info in (first, second):
            assert archive.read(info) == new[info.filename]
            assert info.date_time == like.date_time
            assert info.external_attr == like.external_attr
        lines = archive.read(last).splitlines()
        assert set(record_lines(new).splitlines()) < set(lines)
        assert len(lines) == len(set(lines)) == len(archive.namelist())


def test_an_entry_that_record_does_not_know(tmp_path: Path) -> None:
    path = small_wheel(
        tmp_path / "vllm-0.33.0-py3-none-any.whl",
        {**SMALL, f"{INFO}/RECORD": f"{INFO}/RECORD,,\n"},
    )
    with pytest.raises(BadInput, match="has no hash in RECORD"):
        wheel.pack(resolve(str(path)), {}, b"", tmp_path / "out")


@pytest.mark.parametrize(
    "line",
    [
        "vllm/__init__.py",
        "vllm/__init__.py,sha999=x,0",
        "vllm/__init__.py,shake_128=x,0",
        "vllm/__init__.py,md5=1B2M2Y8AsgTpgAmY7PhCfg,0",  # right, and no proof
        "\udcff,,",
    ],
)
def test_a_record_that_proves_nothing(tmp_path: Path, line: str) -> None:
    path = small_wheel(tmp_path / NAME, SMALL)
    text = f"{line}\n{INFO}/RECORD,,\n".encode(errors="surrogateescape")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{INFO}/RECORD", text)
    with pytest.raises(BadInput, match=r"is damaged \(.*download it again"):
        wheel.pack(resolve(str(path)), {}, b"", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, 1), (10, 97)],  # in the directory of the file: encrypted, unknown compression
)
def test_entries_that_cannot_be_read(tmp_path: Path, offset: int, value: int) -> None:
    path = whole_wheel(tmp_path / NAME)
    data = bytearray(path.read_bytes())
    at = 0
    while (at := data.find(b"PK\1\2", at)) >= 0:
        data[at + offset] = value
        at += 4
    path.write_bytes(data)
    with pytest.raises(BadInput, match=r"is damaged \(.*download it again"):
        resolve(str(path)).read("vllm/__init__.py")


@pytest.mark.parametrize("version", ["0.29.0", "main"])
def test_a_wheel_that_was_renamed(tmp_path: Path, version: str) -> None:
    """What it holds is not of the version in its name; pip refuses it, too."""
    entries = {name.replace("0.33.0", version): text for name, text in SMALL.items()}
    path = whole_wheel(tmp_path / NAME, entries)
    with pytest.raises(BadInput, match=r"no whole wheel of vLLM .*download it again"):
        resolve(str(path))


def test_a_link_to_a_wheel(tmp_path: Path) -> None:
    """Caches keep files under other names; that of the link counts."""
    whole_wheel(tmp_path / "blob")
    (tmp_path / NAME).symlink_to("blob")
    made, _ = wheel.pack(resolve(str(tmp_path / NAME)), {}, b"", tmp_path)
    assert made.name == f"vllm-0.33.0+pinned.{__version__}-py3-none-any.whl"


class Unseekable(io.RawIOBase):
    """A file that a ZIP is streamed to: what is known late stands behind an entry."""

    def __init__(self, path: Path) -> None:
        self.out = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.out.write(data)

    def close(self) -> None:
        self.out.close()
        super().close()


@pytest.mark.parametrize("how", ["streamed", "zip64"])
def test_other_ways_to_write_a_zip(tmp_path: Path, how: str) -> None:
    """The result reads from its beginning, as uv does, and from its end, as pip does."""
    plain = whole_wheel(tmp_path / "plain")
    path = tmp_path / NAME
    with (
        zipfile.ZipFile(plain) as old,
        Unseekable(path) if how == "streamed" else path.open("wb") as out,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            with new.open(name, "w", force_zip64=how == "zip64") as entry:
                entry.write(old.read(name))
    made, _ = wheel.pack(resolve(str(path)), {}, b"", tmp_path / "out")
    for number, pip in enumerate((("pip",), ("uv", "pip"))):
        site = tmp_path / f"site-{number}"
        must(sys.executable, "-m", *pip, "install", "--no-deps", "--target", site, made)
        assert (site / "vllm/__init__.py").exists()


def test_two_packs_at_once(wheels: dict[str, Path], tmp_path: Path) -> None:
    """The second waits for the first, and writes the same again."""
    command = [sys.executable, "-m", "vllm_pinned", "wheel", str(wheels["0.26.0"])]
    both = [
        subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.PIPE)
        for _ in "12"
    ]
    said = {process.communicate()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(said) == 1
    assert len([*tmp_path.iterdir()]) == 2
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        assert archive.testzip() is None


def test_no_room_for_the_wheel(wheels: dict[str, Path], tmp_path: Path) -> None:
    target = resolve(str(wheels["0.33.0"]))
    out = tmp_path / "out"
    out.write_text("a file where the folder should be\n")
    with pytest.raises(
        BadInput, match=r"cannot write .*; free some room, or give another"
    ):
        wheel.pack(target, {}, b"", out)
    assert out.read_text() == "a file where the folder should be\n"


def test_a_killed_pack_leaves_no_wheel(run: Run, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "vllm_pinned", "wheel", "0.33.0", "--out")
    process = subprocess.Popen([*command, str(tmp_path)])
    while not list(tmp_path.glob(".*.whl.part")):
        assert process.poll() is None
    process.kill()
    process.wait()
    assert not [p for p in tmp_path.iterdir() if not p.name.endswith(".part")]
    assert run("wheel", "0.33.0", "--out", tmp_path).returncode == 0
    assert len([*tmp_path.iterdir()]) == 2
