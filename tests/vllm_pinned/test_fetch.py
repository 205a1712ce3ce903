# SPDX-License-Identifier: Apache-2.0
"""Fetching releases: pip's settings, the cache, and what can go wrong."""

import functools
import hashlib
import http.server
import os
import pwd
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from tests.vllm_pinned.conftest import Run
from vllm_pinned import fetch
from vllm_pinned.errors import BadInput

NAME = f"vllm-0.33.0-cp38-abi3-manylinux_2_28_{fetch.machine()}.whl"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """No settings of pip's but the ones that a test gives, and an empty cache."""
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    given = {"PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A package index on this machine: its address, and the folder that it serves."""
    folder = tmp_path / "index"
    (folder / "simple/vllm").mkdir(parents=True)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/", folder
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def publish(folder: Path, data: bytes, promised: bytes | None = None) -> None:
    """Offer `data` as the wheel, with the hash of `promised` if that differs."""
    digest = hashlib.sha256(data if promised is None else promised).hexdigest()
    (folder / NAME).write_bytes(data)
    (folder / "simple/vllm/index.html").write_text(
        f'<a href="/{NAME}#sha256={digest}">{NAME}</a>'
    )


def test_the_cache_is_asked_first(wheels: dict[str, Path], run: Run) -> None:
    """With a release in the cache, no index is needed."""
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "1"}
    assert wheels["0.33.0"].exists()
    assert run("status", "0.33.0", env=nowhere).returncode == 1


def test_an_unknown_release(run: Run) -> None:
    done = run("wheel", "9.9.9")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "vllm-pinned: there is no vLLM 9.9.9; give a release such as "
    )
    assert "0.33.0" in line


@pytest.mark.usefixtures("alone")
def test_no_network(run: Run, alone: dict[str, str], tmp_path: Path) -> None:
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple/"}
    done = run("status", "0.33.0", env=env)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "the package index cannot be reached (" in line
    assert line.endswith("check the network and pip's settings, or give a wheel file")
    assert not (tmp_path / "cache/vllm-pinned").exists()


@pytest.mark.usefixtures("alone")
def test_no_index_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BadInput, match="lead to no vLLM at all"):
        fetch.fetch(Version("0.33.0"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "setting",
    [
        {"PIP_CERT": "/nowhere.pem"},
        {"PIP_CLIENT_CERT": "/nowhere.pem"},
        {"PIP_PROXY": "nowhere"},
        {"PIP_INDEX_URL": "nowhere"},
        {"PIP_INDEX_URL": "http://[nowhere/simple/"},
        {"PIP_TIMEOUT": "soon"},
    ],
    ids=str,
)
def test_settings_that_cannot_be_used(run: Run, setting: dict[str, str]) -> None:
    done = run("status", "0.33.0", env=setting)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "pip" in line
    assert "mend them" in line or "check the network and pip's settings" in line
    assert "()" not in line


@pytest.mark.usefixtures("alone")
def test_an_index_of_other_things(index: tuple[str, Path], run: Run) -> None:
    url, folder = index
    page = folder / "simple/vllm/index.html"
    for text in (
        b"\xff",
        b"no page",
        b'<a href="vllm-x.whl">a</a><a href="/vllm-x.zip">b</a>',
    ):
        page.write_bytes(text)
        done = run("status", "0.33.0", env={"PIP_INDEX_URL": url})
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.endswith("or give a wheel file")


@pytest.mark.usefixtures("alone")
def test_an_index_that_wants_a_password(
    index: tuple[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked, who may not be there."""

    def refuse(handler: Quiet) -> None:
        handler.send_response(401)
        handler.send_header("WWW-Authenticate", 'Basic realm="index"')
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr(Quiet, "do_GET", refuse)
    done = run("status", "0.33.0", env={"PIP_INDEX_URL": index[0]}, stdin=0, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith("or give a wheel file")


@pytest.mark.usefixtures("alone")
def test_other_files_in_the_cache(tmp_path: Path, run: Run) -> None:
    (cache := tmp_path / "cache/vllm-pinned").mkdir(parents=True)
    (cache / "vllm-x.whl").touch()
    done = run("status", "0.33.0", env={"PIP_NO_INDEX": "1"})
    assert done.returncode == 2
    assert "lead to no vLLM at all" in done.stderr


@pytest.mark.usefixtures("alone")
def test_nobodys_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry, as containers have it, and no variable either."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(BadInput, match="set XDG_CACHE_HOME to a folder for it"):
        fetch.fetch(Version("0.33.0"))


@pytest.mark.usefixtures("alone")
def test_from_an_index_into_the_cache(
    index: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, folder = index
    publish(folder, b"a wheel")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")  # down
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", url)
    path = fetch.fetch(Version("0.33.0"))
    assert path == tmp_path / "cache/vllm-pinned" / NAME
    assert path.read_bytes() == b"a wheel"
    (folder / NAME).unlink()
    assert fetch.fetch(Version("0.33.0")) == path


@pytest.mark.usefixtures("alone")
def test_a_wrong_hash(
    index: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, folder = index
    publish(folder, b"tampered with", promised=b"a wheel")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    with pytest.raises(BadInput, match=r"is not what the index promises .*try again"):
        fetch.fetch(Version("0.33.0"))
    assert not list((tmp_path / "cache/vllm-pinned").iterdir())


@pytest.mark.usefixtures("alone")
def test_from_find_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"a wheel")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'missing'} {tmp_path}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch.fetch(Version("0.33.0")) == tmp_path / NAME


@pytest.mark.usefixtures("alone")
def test_another_architecture(
    index: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = index
    publish(folder, b"a wheel")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(
        BadInput, match="has no wheel for Linux on riscv64; give another"
    ):
        fetch.fetch(Version("0.33.0"))


@pytest.mark.usefixtures("alone")
def test_a_cache_that_cannot_be_written(
    index: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, folder = index
    publish(folder, b"a wheel")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    (tmp_path / "cache").write_text("a file where the folder should be\n")
    with pytest.raises(
        BadInput, match=r"cannot write to the cache .*set XDG_CACHE_HOME"
    ):
        fetch.fetch(Version("0.33.0"))


def test_pips_settings_are_merged(
    alone: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a.example/simple\ntimeout = 5\n"
        "[download]\ntimeout = 7\n[install]\ntimeout = 9\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_TRUSTED_HOST", "a.example b.example")
    settings = fetch.pip_settings()
    assert settings["index-url"] == ["https://a.example/simple"]
    assert settings["timeout"] == ["7"]
    assert settings["trusted-host"] == ["a.example", "b.example"]
    assert alone["PIP_CONFIG_FILE"] == os.devnull


@pytest.mark.usefixtures("alone")
def test_settings_that_pip_cannot_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (config := tmp_path / "pip.conf").write_text("index-url = no section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    with pytest.raises(BadInput, match=r"pip cannot read its settings .*mend them"):
        fetch.pip_settings()
