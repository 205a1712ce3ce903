# SPDX-License-Identifier: Apache-2.0
"""What the check for rewritten copies costs: `python benchmarks/h2d_race_check.py`.

Host time of an asynchronous copy from pinned memory, with the check off and on, on an
idle GPU; comparing what arrived is part of it. Needs an NVIDIA GPU, and a vLLM with
the check.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch

from vllm.utils.h2d_race_check import H2DRaceCheck

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Tensor.copy_": lambda gpu, host: gpu.copy_(host, non_blocking=True),
    "Tensor.to": lambda gpu, host: host.to(gpu.device, non_blocking=True),
}
ROUNDS, COPIES = 30, 20


def microseconds(copy: Callable[[], object]) -> float:
    """Host time of one of COPIES copies, the GPU idle before them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(COPIES):
        copy()
    return (time.perf_counter() - start) / COPIES * 1e6


def measure(copy: Callable[[], object]) -> tuple[float, float]:
    """Medians with the check off and on, taken in turn."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS + 1):
        for on in (False, True):
            check = H2DRaceCheck("error")
            if on:
                check.install()
            try:
                taken = microseconds(copy)
                check.check()
            finally:
                check.remove()
            if number:  # the first time round fills the caches
                times[on].append(taken)
    return statistics.median(times[False]), statistics.median(times[True])


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU; run this where torch.cuda.is_available()")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, host us a copy")
    print(f"{'operation':14}{'size':>8}{'off':>10}{'on':>10}")
    for operation, function in OPERATIONS.items():
        for size, count in SIZES.items():
            host = torch.ones(count, dtype=torch.uint8).pin_memory()
            gpu = host.to("cuda")
            off, on = measure(lambda f=function, g=gpu, h=host: f(g, h))
            print(f"{operation:14}{size:>8}{off:10.1f}{on:10.1f}")


if __name__ == "__main__":
    main()
