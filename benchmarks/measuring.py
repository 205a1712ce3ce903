# SPDX-License-Identifier: Apache-2.0
"""What the measurements share. Each is a process of its own."""

import json
import statistics
from pathlib import Path
from typing import Any

import torch


def cycles_per_ms() -> float:
    """Of the clock that torch.cuda._sleep() counts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    torch.cuda.synchronize()
    return 50_000_000 / start.elapsed_time(end)


def summary(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in the unit of `times`."""
    return {
        "median": statistics.median(times),
        "p99": statistics.quantiles(times, n=100)[98],
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write what there is so far; /dev/stdout will do."""
    path.write_text(json.dumps(result, indent=1) + "\n")
