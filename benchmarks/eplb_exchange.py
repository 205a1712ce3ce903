# SPDX-License-Identifier: Apache-2.0
"""EPLB's exchange of expert weights over Gloo, between ranks that share one GPU.

    python benchmarks/eplb_exchange.py RESULT.json      (/dev/stdout will do)

The ranks are processes. In an exchange each sends `mib` MiB to the next rank, and
receives as many from the one before, in tensors of at most 16 MiB, with the released
communicator of the vLLM that is imported. A row of the result, times in ms:

- first_ms, steady_ms: the whole exchange, from a barrier until what was received is on
  the GPU, of the slowest rank: the first, with nothing in PyTorch's cache of pinned
  memory, and the median of 5 later ones. It copies to the host, too, what is sent.
- transport_ms: Gloo alone, the same bytes in the same group from and to pinned memory
  that is there already, in turn with these. Median of 5, of the slowest rank.
- copy_gbps: of the copy stage, which follows Gloo and puts what was received on the
  GPU: bytes by the GPU's time from its first copy to its last, in GB/s. Here and in
  the next three, the ranks take turns in the copy stage.
- limit_gbps: the same of one copy of a pinned tensor of that size.
- copy_host_ms: how long the copy stage keeps the host.
- copy_host_busy_ms: the same behind a kernel of 50 ms, and
- waited: whether that kernel had ended when the stage returned.

Needs an NVIDIA GPU, pytest (it drives vLLM as the regression does), and what vLLM
imports.
"""

import fcntl
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from measuring import cycles_per_ms, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/distributed"))

SIZES = (1, 4, 16, 64, 256, 512)  # MiB
WORLDS = (4, 2)  # the ranks above 2 end after the first
PIECE = 16 << 20  # bytes of a tensor, at most
ROUNDS = 5
TURNS = 3
KERNEL = 50.0  # ms


class Exchange:
    """One rank's side of exchanges of one size: to the next rank, from the last."""

    def __init__(self, communicator: Any, rank: int, world: int, size: int) -> None:
        self.communicator = communicator
        self.size = size
        self.target, self.source = (rank + 1) % world, (rank - 1) % world
        pieces = [min(PIECE, size)] * (size // min(PIECE, size))
        self.sent = [
            torch.full((piece,), rank, dtype=torch.uint8, device="cuda")
            for piece in pieces
        ]
        self.received = [torch.full_like(tensor, 255) for tensor in self.sent]

    def run(self) -> None:
        self.communicator.add_send(self.sent, self.target, expert_id=0)
        self.communicator.add_recv(self.received, self.source, expert_id=0)
        self.communicator.execute()

    def check(self) -> None:
        """What arrived must be what was sent, or nothing measured here counts."""
        if not all(bool((tensor == self.source).all()) for tensor in self.received):
            raise RuntimeError("what arrived is not what was sent")


class Turn:
    """Comes last in the requests of an exchange: the copy stage follows its wait().

    Until `over()`, no other rank is in its copy stage.
    """

    def __init__(self, lock: IO[str], cycles: int) -> None:
        self.lock = lock
        self.cycles = cycles
        self.kernel = torch.cuda.Event()
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def wait(self) -> None:
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        self.kernel.record()
        self.start.record()
        self.began = time.perf_counter()

    def over(self, size: int) -> dict[str, Any]:
        host = time.perf_counter() - self.began
        waited = self.kernel.query()
        self.end.record()
        torch.cuda.synchronize()
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        gbps = size / self.start.elapsed_time(self.end) / 1e6
        return {"host_ms": host * 1000, "waited": waited, "gbps": gbps}


@contextmanager
def last_request(turn: Turn) -> Iterator[None]:
    """Make it the last request of what is exchanged inside."""
    from vllm.distributed.eplb import eplb_communicator

    start = eplb_communicator.batch_isend_irecv
    eplb_communicator.batch_isend_irecv = lambda ops: [*start(ops), turn]
    try:
        yield
    finally:
        eplb_communicator.batch_isend_irecv = start


def in_turn(exchange: Exchange, lock: IO[str], cycles: int = 0) -> dict[str, Any]:
    """An exchange of which the copy stage is measured, behind a kernel of `cycles`."""
    turn = Turn(lock, cycles)
    with last_request(turn):
        exchange.run()
    return turn.over(exchange.size)


def plain_copy(host: torch.Tensor, gpu: torch.Tensor, lock: IO[str]) -> float:
    """GB/s of one copy of a pinned tensor."""
    turn = Turn(lock, 0)
    turn.wait()
    gpu.copy_(host, non_blocking=True)
    return turn.over(host.nbytes)["gbps"]


def transport(exchange: Exchange, group: dist.ProcessGroup) -> Callable[[], None]:
    """What Gloo alone has to do for the exchange, between tensors in pinned memory."""
    sent, received = (
        [torch.zeros_like(t, device="cpu", pin_memory=True) for t in exchange.sent]
        for _ in range(2)
    )

    def run() -> None:
        operations = [
            *(dist.P2POp(dist.isend, t, exchange.target, group) for t in sent),
            *(dist.P2POp(dist.irecv, t, exchange.source, group) for t in received),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return run


def milliseconds(action: Callable[[], None]) -> float:
    """Of an action that all ranks begin together, until the GPU is done."""
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000


def measure(
    exchange: Exchange, group: dist.ProcessGroup, lock: IO[str], cycles: int
) -> dict[str, list[Any]]:
    """What one rank sees, a value for each time."""
    torch._C._host_emptyCache()
    found: dict[str, list[Any]] = {
        "first": [milliseconds(exchange.run)],
        "idle": [in_turn(exchange, lock) for _ in range(TURNS)],
        "busy": [in_turn(exchange, lock, cycles) for _ in range(TURNS)],
        "steady": [],
        "transport": [],
    }
    exchange.check()
    alone = transport(exchange, group)
    alone()
    for _ in range(ROUNDS):
        found["steady"].append(milliseconds(exchange.run))
        found["transport"].append(milliseconds(alone))
    host = torch.zeros(exchange.size, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty_like(host, device="cuda")
    plain_copy(host, gpu, lock)
    found["limit"] = [plain_copy(host, gpu, lock) for _ in range(ROUNDS)]
    return found


def summarise(ranks: list[dict[str, list[Any]]]) -> dict[str, Any]:
    """A row of the result, of what all ranks saw."""

    def slowest(key: str) -> float:
        each = zip(*(rank[key] for rank in ranks), strict=True)
        return statistics.median(max(times) for times in each)

    def every(key: str, value: str) -> list[Any]:
        return [time[value] for rank in ranks for time in rank[key]]

    return {
        "first_ms": slowest("first"),
        "steady_ms": slowest("steady"),
        "transport_ms": slowest("transport"),
        "copy_gbps": statistics.median(every("idle", "gbps")),
        "limit_gbps": statistics.median(v for rank in ranks for v in rank["limit"]),
        "copy_host_ms": statistics.median(every("idle", "host_ms")),
        "copy_host_busy_ms": statistics.median(every("busy", "host_ms")),
        "waited": any(every("busy", "waited")),
    }


def run_rank(rank: int, folder: Path, path: Path) -> None:
    """Run in a rank: measure every size, with each number of ranks that has it."""
    from test_eplb_gloo_staging import gloo_communicator

    torch.cuda.set_device(0)
    cycles = int(KERNEL * cycles_per_ms())
    rows = []
    for world in WORLDS:
        if rank >= world:
            return
        with (
            gloo_communicator(rank, world, str(folder / f"store{world}"), "cuda") as (
                coordinator,
                communicator,
            ),
            (folder / "lock").open("w") as lock,
        ):
            for mib in SIZES:
                exchange = Exchange(communicator, rank, world, mib << 20)
                mine = measure(exchange, coordinator.cpu_group, lock, cycles)
                ranks: list[Any] = [None] * world
                dist.all_gather_object(ranks, mine)
                rows.append({"ranks": world, "mib": mib} | summarise(ranks))
                if rank == 0:
                    write(path, {"rows": rows})


def main() -> None:
    path = Path(sys.argv[1])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            run_rank, (Path(folder), path), nprocs=max(WORLDS), join=True
        )


if __name__ == "__main__":
    main()
