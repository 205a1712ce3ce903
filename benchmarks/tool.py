# SPDX-License-Identifier: Apache-2.0
"""How long the tool takes, and how much memory: `python benchmarks/tool.py [RELEASE]`.

`status` and `apply` run on the unpacked release, `wheel` on the downloaded one. Each
runs as a command of its own; the best of three counts, and the most memory.
"""

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from packaging.version import Version

from vllm_pinned.fetch import fetch

AIMS = {"status": 1.5, "apply": 2.0, "wheel": 20.0}  # seconds
RUNS = 3


def run(*arguments: object) -> tuple[float, float]:
    """Seconds and peak memory in MB of one command, its children included."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_pinned", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) > 1:
        sys.exit(f"vllm-pinned {' '.join(map(str, arguments))} failed")
    return seconds, usage.ru_maxrss / 1024


def main() -> None:
    release = sys.argv[1] if len(sys.argv) > 1 else "0.33.0"
    wheel = fetch(Version(release))
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder, "vllm"), Path(folder, "out")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root)
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in AIMS}
        for _ in range(RUNS):
            results["status"].append(run("status", root))
            results["apply"].append(run("apply", root))
            run("revert", root)
            results["wheel"].append(run("wheel", wheel, "--out", out))
    print(f"vLLM {release}, {os.cpu_count()} cores, best of {RUNS}")
    print(f"{'command':8} {'seconds':>8} {'aim':>6} {'MB':>6}")
    for name, found in results.items():
        seconds, memory = min(s for s, _ in found), max(m for _, m in found)
        print(f"{name:8} {seconds:8.2f} {AIMS[name]:6.1f} {memory:6.0f}")


if __name__ == "__main__":
    main()
