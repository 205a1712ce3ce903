# SPDX-License-Identifier: Apache-2.0
"""Fetching a released wheel as pip would, once, into a cache."""

import ast
import contextlib
import logging
import os
import platform
import ssl
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx2
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)
from unearth import Link, Package, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.errors import UnpackError
from unearth.fetchers.sync import PyPIClient

from vllm_pinned.errors import BadInput, one_line

ATTEMPTS = 3

# What a source is that cannot be used: no connection, no address, no page, no file.
UNUSABLE = (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError)

# An index that lacks vLLM is no news to the user.
logging.getLogger("unearth").setLevel(logging.ERROR)


def fetch(version: Version) -> Path:
    """The wheel of release `version` for Linux on this machine's architecture.

    It is looked for in the cache first, then on the indexes of the user's pip
    settings. Its hash is checked against the index before it enters the cache.

    Raises:
        BadInput: there is no such release, no network, or no room.

    """
    cache = _cache()
    for path in sorted(cache.glob("vllm-*.whl")):
        if _fits(path.name, version):
            return path
    packages: list[Package] = []
    unreachable: Exception | None = None
    for finder in _sources():
        try:
            packages += (
                found := list(finder.find_all_packages("vllm", allow_yanked=True))
            )
        except UNUSABLE as error:
            unreachable = error  # like pip, try the next source
            continue
        for package in found:
            if package.link.is_wheel and _fits(package.link.filename, version):
                return _download(finder, package, cache)
    if unreachable:
        raise BadInput(_unreachable(unreachable))
    raise BadInput(_unknown(version, packages))


def _cache() -> Path:
    with contextlib.suppress(RuntimeError):  # where there is no home folder
        if (path := user_cache_path("vllm-pinned")).is_absolute():
            return path
    raise BadInput(
        "there is no home folder to keep the release in; "
        "set XDG_CACHE_HOME to a folder for it, or give a wheel file"
    )


def _sources() -> list[PackageFinder]:
    try:
        return finders(pip_settings())
    except UNUSABLE as error:
        raise BadInput(
            f"pip's settings cannot be used ({one_line(error)}); "
            "mend them (`pip config list` shows them), or give a wheel file"
        ) from None


def machine() -> str:
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _fits(filename: str, version: Version) -> bool:
    """Whether `filename` is a wheel of `version` for Linux on this architecture."""
    try:
        name, found, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return False
    return (
        name == "vllm"
        and found == version
        and any("linux" in t.platform and t.platform.endswith(machine()) for t in tags)
    )


def pip_settings() -> dict[str, list[str]]:
    """Pip's settings for a download, by option name, split at white space.

    pip merges its files and the environment itself; `pip config list` shows the
    result, a section and an option a line. Later sections win, as in pip.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BadInput(
            "pip cannot read its settings "
            f"({one_line(done.stderr or done.stdout)}); mend them"
        )
    by_section: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        by_section[section][option] = str(ast.literal_eval(value)).split()
    merged: dict[str, list[str]] = {}
    for section in ("global", "download", ":env:"):
        merged |= by_section[section]
    return merged


def finders(settings: dict[str, list[str]]) -> list[PackageFinder]:
    """One finder for each place that pip would look in, in its order."""

    def first(option: str) -> str | None:
        return next(iter(settings.get(option, [])), None)

    indexes = []
    if first("no-index") not in ("1", "true", "True", "yes", "on"):
        index = first("index-url") or "https://pypi.org/simple/"
        indexes = [index, *settings.get("extra-index-url", [])]
    trusted = settings.get("trusted-host", [])
    session: Any = PyPIClient(
        trusted_hosts=trusted,
        verify=ssl.create_default_context(cafile=cert)
        if (cert := first("cert"))
        else True,
        cert=first("client-cert"),
        proxy=first("proxy"),
        timeout=float(first("timeout") or first("default-timeout") or 15),
        follow_redirects=True,
    )
    session.auth = MultiDomainBasicAuth(prompting=False, index_urls=indexes)
    links = [
        link
        for link in settings.get("find-links", [])
        if "://" in link or Path(link).exists()
    ]
    shared: dict[str, Any] = {"trusted_hosts": trusted, "ignore_compatibility": True}
    finders = [PackageFinder(session, find_links=[link], **shared) for link in links]
    return finders + [
        PackageFinder(session, index_urls=[url], **shared) for url in indexes
    ]


def _download(finder: PackageFinder, package: Package, cache: Path) -> Path:
    """Download into the cache; the file appears there whole and checked."""
    link = package.link
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)  # stdout is for results alone
    with Progress(
        *columns, TransferSpeedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task(link.filename, total=None)

        def report(link: Link, completed: int, total: int | None) -> None:
            progress.update(task, completed=completed, total=total)

        for attempt in range(ATTEMPTS):
            try:
                cache.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=cache) as folder:
                    got = finder.download_and_unpack(
                        link, folder, folder, download_reporter=report
                    )
                    target = cache / link.filename
                    if got.is_relative_to(folder):
                        os.replace(got, target)
                        return target
                    return got  # a wheel in a folder of the user's find-links
            except httpx2.HTTPError as error:
                if attempt == ATTEMPTS - 1:
                    raise BadInput(_unreachable(error)) from None
            except UnpackError as error:
                raise BadInput(
                    f"{link.filename} is not what the index promises "
                    f"({one_line(error)}); check the index and try again"
                ) from None
            except OSError as error:
                raise BadInput(
                    f"cannot write to the cache {cache} ({error.strerror}); "
                    "make room there, or set XDG_CACHE_HOME to another folder"
                ) from None
    raise AssertionError("unreachable")


def _unreachable(error: Exception) -> str:
    what = one_line(error) or type(error).__name__
    return (
        f"the package index cannot be reached ({what}); "
        "check the network and pip's settings, or give a wheel file"
    )


def _unknown(version: Version, packages: list[Package]) -> str:
    versions = {Version(p.version) for p in packages if p.version}
    if not versions:
        return (
            "pip's settings lead to no vLLM at all; "
            "mend them (`pip config list` shows them), or give a wheel file"
        )
    if version in versions:
        return (
            f"vLLM {version} has no wheel for Linux on {machine()}; "
            "give another release or a wheel file"
        )
    newest = ", ".join(str(v) for v in sorted(versions, reverse=True)[:5])
    return f"there is no vLLM {version}; give a release such as {newest}"
