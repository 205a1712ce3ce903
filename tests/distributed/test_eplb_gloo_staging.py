# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Exchanges of expert weights over Gloo, staged in host memory, between real ranks.

TorchDistGlooStagedEplbCommunicator receives into host tensors and copies them to the
GPU with non_blocking=True. Two faults are guarded here:

- pageable staging: VLLM_GPU_SYNC_CHECK=error rejects the copy (from 0.30.0 on; older
  checks do not look at copies), and the third of more than 64 KiB in flight, or one far
  larger, blocks the host until the stream gets there;
- pinned staging that is written again while a copy still reads it: the destination
  gets the bytes of a later exchange.

Every rank is a process of its own, and all of them share one GPU. They stay up for the
whole module and run the cases below by name. Nothing of the transfer is replaced: where
a test needs the copies late, a long kernel is queued between the end of the Gloo
exchange and the copies. Without a GPU the same cases run on CPU tensors.
"""

import functools
import os
import re
import resource
import runpy
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm.config import (
    DeviceConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.eplb import eplb_communicator
from vllm.distributed.eplb.eplb_communicator import (
    TorchDistGlooStagedEplbCommunicator,
    create_eplb_communicator,
)
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.utils import gpu_sync_debug

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
)
# The device, and the streams the communicator is given.
NO_STREAM = [
    pytest.param("cpu", "none", id="cpu"),
    pytest.param("cuda", "none", id="cuda-no-stream", marks=GPU),
]
PLACES = [*NO_STREAM, pytest.param("cuda", "own", id="cuda-own-stream", marks=GPU)]

# The tensors of one message: dtype and number of elements.
Tensors = list[tuple[str, int]]
MESSAGES: dict[str, Tensors] = {
    "bytes": [("uint8", 1), ("float8_e4m3fn", 1), ("bfloat16", 1), ("float16", 3)],
    "64KiB": [("uint8", 65536), ("uint8", 65537), ("float8_e5m2", 65535)],
    "expert": [("bfloat16", 3 << 18), ("float8_e4m3fn", 1 << 20), ("uint8", 98305)],
    "half": [("float16", 1 << 19), ("bfloat16", 0), ("uint8", 7)],
}
HUGE: Tensors = [("bfloat16", 64 << 20), ("uint8", 4096)]  # 128 MiB and its scales

DELAY_CYCLES = 2_000_000_000  # about a second
HANG_SECONDS = 300  # far beyond the start of a rank, and beyond any case
RANK = "eplb_rank"  # __name__ of this file in a rank


def gpu(test: Callable) -> Callable:
    for mark in GPU:
        test = mark(test)
    return test


def routes(kind: str, world_size: int, rank: int) -> list[tuple[int, int]]:
    """Who sends to whom, as far as this rank takes part."""
    ranks = range(world_size)
    ways = {
        "all-to-all": [(src, dst) for src in ranks for dst in ranks if src != dst],
        "one-to-one": [(0, 1)],  # with four ranks two have nothing to do
        "one-to-all": [(0, dst) for dst in ranks[1:]],
        "all-to-one": [(src, 0) for src in ranks[1:]],
        "nobody": [],
    }
    return [way for way in ways[kind] if rank in way]


# ---- In a rank: what the cases are made of.


class NoStream:
    """Stands in for the current stream of a machine that has no GPU."""

    def synchronize(self) -> None:
        """A CPU copy is done when it returns."""


def stand_in_for_missing_gpu() -> None:
    """Neither a current stream nor pinned memory exists without a GPU driver."""
    torch.cuda.current_stream = torch.accelerator.current_stream = NoStream
    if hasattr(eplb_communicator, "PIN_MEMORY"):
        eplb_communicator.PIN_MEMORY = False


@functools.cache
def vllm_config(timeout: int) -> VllmConfig:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return VllmConfig(
        parallel_config=ParallelConfig(cpu_distributed_timeout_seconds=timeout),
        device_config=DeviceConfig(device=device),
    )


@contextmanager
def gloo_communicator(
    rank: int, world_size: int, store: str, device: str, timeout: int = 60
) -> Iterator[tuple[GroupCoordinator, TorchDistGlooStagedEplbCommunicator]]:
    """The production communicator, on new Gloo groups."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        world_size=world_size,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    try:
        with set_current_vllm_config(vllm_config(timeout)):
            coordinator = GroupCoordinator(
                group_ranks=[list(range(world_size))],
                local_rank=0,
                torch_distributed_backend="gloo",
                use_device_communicator=False,
                group_name="eplb",
            )
        weight = torch.zeros(1, device=device)
        communicator = create_eplb_communicator(
            group_coordinator=coordinator,
            backend="torch_gloo",
            expert_weights=[[weight]],
            expert_buffer=[weight],
        )
        assert type(communicator) is TorchDistGlooStagedEplbCommunicator
        yield coordinator, communicator
    finally:
        dist.destroy_process_group()


class Delay:
    """Comes last in the requests of an exchange: the copies follow its wait()."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.end = torch.cuda.Event()
        self.allowed_syncs = 0

    def wait(self) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(DELAY_CYCLES)
            self.end.record()

    def running(self) -> bool:
        return not self.end.query()


@contextmanager
def delayed_copies(stream: torch.cuda.Stream | None) -> Iterator[Delay]:
    """Make the stream busy after the real exchange and before the copies."""
    delay = Delay(stream)
    exchange = eplb_communicator.batch_isend_irecv
    allowed = eplb_communicator.gpu_sync_allowed

    def count_allowed(*args: Any, **kwargs: Any) -> Any:
        delay.allowed_syncs += 1
        return allowed(*args, **kwargs)

    eplb_communicator.batch_isend_irecv = lambda ops: [*exchange(ops), delay]
    eplb_communicator.gpu_sync_allowed = count_allowed
    try:
        yield delay
    finally:
        eplb_communicator.batch_isend_irecv = exchange
        eplb_communicator.gpu_sync_allowed = allowed


def checked(function: Callable, *args: Any) -> None:
    """Call it under the strict check, which vLLM turns off where there is no GPU."""
    gpu_sync_debug.with_gpu_sync_check(function)(*args)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def payload(device: str, dtype: str, numel: int, *key: int) -> torch.Tensor:
    """Random bytes, the same in every rank for the same key."""
    generator = torch.Generator(device)
    generator.manual_seed(functools.reduce(lambda seed, k: 997 * seed + k, key, 1))
    kind = getattr(torch, dtype)
    size = (numel * kind.itemsize,)
    data = torch.randint(
        256, size, dtype=torch.uint8, device=device, generator=generator
    )
    return data.view(kind)


def wrong_bytes(got: torch.Tensor, want: torch.Tensor) -> int:
    return int((got.view(torch.uint8) != want.view(torch.uint8)).sum())


class Message:
    """What one rank sends to another in one round: several tensors."""

    def __init__(self, device: str, tensors: Tensors, *key: int) -> None:
        self.key = key
        self.sent = [payload(device, *spec, *key, i) for i, spec in enumerate(tensors)]
        # No byte is right before it is received.
        self.before = [(~t.view(torch.uint8)).view(t.dtype) for t in self.sent]
        self.received = [t.clone() for t in self.before]

    def wrong(self) -> list[str]:
        pairs = zip(self.received, self.sent, strict=True)
        wrong = [(i, wrong_bytes(got, want)) for i, (got, want) in enumerate(pairs)]
        return [f"{self.key}[{i}]: {n} bytes wrong" for i, n in wrong if n]

    def touched(self) -> bool:
        pairs = zip(self.received, self.before, strict=True)
        return any(wrong_bytes(*pair) for pair in pairs)


Messages = dict[tuple[int, int], Message]


def make_round(
    number: int, ways: list[tuple[int, int]], tensors: Tensors, device: str
) -> Messages:
    return {way: Message(device, tensors, number, *way) for way in ways}


def enqueue(
    communicator: TorchDistGlooStagedEplbCommunicator, rank: int, messages: Messages
) -> None:
    for (src, dst), message in messages.items():
        if rank == src:
            communicator.add_send(message.sent, dst, expert_id=0)
        if rank == dst:
            communicator.add_recv(message.received, src, expert_id=0)


def wrong_in(rank: int, messages: Messages) -> list[str]:
    received = [m for (_, dst), m in messages.items() if dst == rank]
    return [line for message in received for line in message.wrong()]


def make_streams(streams: str, rounds: int) -> list[torch.cuda.Stream | None]:
    if streams == "none":
        return [None] * rounds
    if streams == "own":
        return [torch.cuda.Stream()] * rounds
    return [torch.cuda.Stream() for _ in range(rounds)]


def warm_up(
    communicator: TorchDistGlooStagedEplbCommunicator,
    rank: int,
    rounds: list[Messages],
    device: str,
) -> None:
    """Everything once in one exchange: its staging memory stays with the allocator.

    So no later exchange has to ask the driver for memory while a kernel runs.
    """
    torch.cuda._sleep(1)
    for messages in rounds:
        enqueue(communicator, rank, messages)
    communicator.execute()
    synchronize(device)


# ---- In a rank: the cases, run by name.


def strict_check(**_: Any) -> list[str]:
    """What the check says about operations that synchronise."""
    gpu_tensor = torch.zeros(1024, device="cuda")
    cpu_tensor = torch.zeros(1024)
    operations: list[Callable] = [gpu_tensor.sum().item]
    if hasattr(gpu_sync_debug, "_install_copy_checkers"):
        operations.append(lambda: gpu_tensor.copy_(cpu_tensor, non_blocking=True))
    verdicts = []
    for operation in operations:
        try:
            checked(operation)
            verdicts.append("passed")
        except RuntimeError as error:
            verdicts.append(str(error))
    return verdicts


def exchange(
    rank: int,
    world_size: int,
    store: str,
    device: str,
    streams: str,
    kind: str,
    tensors: Tensors,
    rounds: int = 1,
    delayed: bool = False,
) -> dict[str, Any]:
    """One exchange after the other, and only then a look at what arrived."""
    ways = routes(kind, world_size, rank)
    with gloo_communicator(rank, world_size, store, device) as (_, communicator):
        work = [make_round(i, ways, tensors, device) for i in range(rounds)]
        if delayed:
            spare = [make_round(-1 - i, ways, tensors, device) for i in range(rounds)]
            warm_up(communicator, rank, spare, device)
        synchronize(device)

        delays = []
        for messages, stream in zip(work, make_streams(streams, rounds), strict=True):
            communicator.set_stream(stream)
            enqueue(communicator, rank, messages)
            with delayed_copies(stream) if delayed else nullcontext() as delay:
                checked(communicator.execute)
            delays.append(delay)
        # Before anything that waits for the GPU.
        running = [delay.running() for delay in delays if delay]

        synchronize(device)
        return {
            "running": running,
            "allowed syncs": [delay.allowed_syncs for delay in delays if delay],
            "wrong": [line for messages in work for line in wrong_in(rank, messages)],
            "queue": len(communicator._ops),
        }


def refused_exchange(
    rank: int, world_size: int, store: str, device: str, streams: str
) -> dict[str, Any]:
    """A send to a rank that does not exist, then an exchange in the same group."""
    ways = routes("all-to-all", world_size, rank)
    with gloo_communicator(rank, world_size, store, device) as (_, communicator):
        communicator.set_stream(*make_streams(streams, 1))
        messages = make_round(0, ways, MESSAGES["expert"], device)
        synchronize(device)
        enqueue(communicator, rank, messages)
        communicator.add_send([torch.zeros(9, device=device)], world_size, expert_id=0)
        outcome = attempt(communicator, rank, messages)

        enqueue(communicator, rank, messages)
        checked(communicator.execute)
        synchronize(device)
        return {**outcome, "wrong": wrong_in(rank, messages)}


def failing_exchange(
    rank: int,
    world_size: int,
    store: str,
    device: str,
    streams: str,
    sent: Tensors,
    expected: Tensors,
    dying: int | None = None,
) -> dict[str, Any]:
    """Rank 0 sends what nobody expects, or a rank dies after its first operation."""
    ways = routes("all-to-all", world_size, rank)
    with gloo_communicator(rank, world_size, store, device, timeout=3) as (_, comm):
        comm.set_stream(*make_streams(streams, 1))
        messages = make_round(0, ways, expected, device)
        for way in ways if rank == 0 else []:
            if way[0] == 0:
                messages[way] = Message(device, sent, 0, *way)
        synchronize(device)
        enqueue(comm, rank, messages)
        if rank == dying:
            eplb_communicator.batch_isend_irecv = die_exchanging
        outcome = attempt(comm, rank, messages)
        # Whoever is done keeps its connections until the others are.
        with suppress(RuntimeError):
            dist.all_reduce(torch.zeros(1))
        return outcome


def die_exchanging(ops: list[dist.P2POp]) -> None:
    """The first operation is done, the others never are."""
    dist.batch_isend_irecv(ops[:1])[0].wait()
    os.kill(os.getpid(), signal.SIGKILL)


def attempt(
    communicator: TorchDistGlooStagedEplbCommunicator, rank: int, messages: Messages
) -> dict[str, Any]:
    error = None
    try:
        checked(communicator.execute)
    except (RuntimeError, ValueError) as exception:
        error = str(exception)
    received = [m for (_, dst), m in messages.items() if dst == rank]
    return {
        "error": error,
        "queue": len(communicator._ops),
        "touched": any(message.touched() for message in received),
    }


def expert_maps(world_size: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert of each slot before and after, for two layers, some experts twice."""
    slots = world_size * local
    old = torch.arange(slots) % (slots * 2 // 3)
    shuffled = old[torch.randperm(slots, generator=torch.Generator().manual_seed(3))]
    return torch.stack([old, old]), torch.stack([shuffled, old.roll(local)])


def expert_rows(
    device: str, layer: int, experts: torch.Tensor, tensors: Tensors
) -> list[torch.Tensor]:
    """The weights of one layer: a row for each expert."""
    weights = []
    for i, (dtype, numel) in enumerate(tensors):
        rows = [payload(device, dtype, numel, layer, e, i) for e in experts.tolist()]
        stacked = torch.stack([row.view(torch.uint8) for row in rows])
        weights.append(stacked.view(rows[0].dtype))
    return weights


def rearrange(
    rank: int,
    world_size: int,
    store: str,
    device: str,
    streams: str,
    delayed: bool = False,
    local: int = 3,
) -> dict[str, Any]:
    """Two layers of experts, from an old expert map to a new one."""
    tensors = MESSAGES["expert"]
    old, new = expert_maps(world_size, local)
    mine = slice(rank * local, (rank + 1) * local)
    weights = [expert_rows(device, i, row[mine], tensors) for i, row in enumerate(old)]
    wanted = [expert_rows(device, i, row[mine], tensors) for i, row in enumerate(new)]
    before = [t.clone() for layer in weights for t in layer]
    buffer = [torch.empty_like(t) for t in weights[0]]
    maps = old.to(device), new.to(device)
    with gloo_communicator(rank, world_size, store, device) as (group, communicator):
        if delayed:
            torch.cuda._sleep(1)
        synchronize(device)
        with delayed_copies(None) if delayed else nullcontext() as delay:
            checked(
                rearrange_expert_weights_inplace,
                *maps,
                weights,
                buffer,
                group.device_group,
                communicator,
            )
        running = [delay.running()] if delay else []
        synchronize(device)
        got = [t for layer in weights for t in layer]
        want = [t for layer in wanted for t in layer]
        return {
            "running": running,
            "wrong": [n for n in map(wrong_bytes, got, want) if n],
            "moved": sum(map(wrong_bytes, before, got)),
            "queue": len(communicator._ops),
        }


# ---- The ranks.


def serve(connection: Connection, log: str) -> None:
    """Run in a rank: run cases until the test process hangs up."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        gpu_sync_debug.enable_gpu_sync_check()
    else:
        stand_in_for_missing_gpu()
    with suppress(EOFError):
        connection.send((True, "ready"))
        while True:
            case, arguments = connection.recv()
            try:
                connection.send((True, globals()[case](**arguments)))
            except Exception:
                connection.send((False, traceback.format_exc()))


class Rank:
    """A process of its own that runs cases."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.connection, theirs = get_context("spawn").Pipe()
        # By path: a rank cannot know under which name pytest imports this file.
        self.process = get_context("spawn").Process(
            target=runpy.run_path,
            args=(__file__, {"connection": theirs, "log": str(log)}, RANK),
            daemon=True,
        )
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_GPU_SYNC_CHECK", "error")
            environment.setenv("GLOO_SOCKET_IFNAME", "lo")
            self.process.start()
        theirs.close()
        self.ready = False

    def await_ready(self) -> None:
        if not self.ready:
            self.ready, result = self.result(time.monotonic() + HANG_SECONDS)
        if not self.ready:
            pytest.fail(f"a rank does not start: {result}", pytrace=False)

    def result(self, deadline: float) -> tuple[bool | None, Any]:
        """Whether the case went well, and its result; None if the rank died."""
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            self.stop()
            return False, f"hangs, killed\n{self.tail()}"
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return None, {"exit": self.process.exitcode, "output": self.tail()}

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


class Ranks:
    """Four ranks; a case of fewer runs in the first of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = 0
        self.cases = 0
        self.ranks = [self.start() for _ in range(4)]

    def start(self) -> Rank:
        self.started += 1
        return Rank(self.folder / f"process{self.started}.log")

    def run(
        self, case: Callable, world_size: int, dead: int | None = None, **arguments: Any
    ) -> list[Any]:
        """The results of all ranks; of the one that has to die, how it died."""
        self.cases += 1
        store = str(self.folder / f"store{self.cases}")
        for rank in self.ranks[:world_size]:
            rank.await_ready()
        deadline = time.monotonic() + HANG_SECONDS
        for number, rank in enumerate(self.ranks[:world_size]):
            group = {"rank": number, "world_size": world_size, "store": store}
            rank.connection.send((case.__name__, group | arguments))
        results = [rank.result(deadline) for rank in self.ranks[:world_size]]
        for number, rank in enumerate(self.ranks):
            if not rank.process.is_alive():
                self.ranks[number] = self.start()
        failures = [
            f"rank {number}: {result}"
            for number, (done, result) in enumerate(results)
            if done is not (None if number == dead else True)
        ]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        return [result for _, result in results]

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("eplb"))
    for rank in ranks.ranks:
        rank.await_ready()
    yield ranks
    ranks.stop()


def assert_running(results: list[dict[str, Any]], expected: list[list[bool]]) -> None:
    """Which of the long kernels still ran when the last execute() had returned."""
    running = [result["running"] for result in results]
    assert running == expected, "the host waited for the stream"


def assert_all_arrived(results: list[dict[str, Any]]) -> None:
    assert [result["wrong"] for result in results] == [[] for _ in results]
    assert [result["queue"] for result in results] == [0 for _ in results]


# ---- The tests.


@gpu
def test_strict_check_is_armed(ranks: Ranks) -> None:
    """Every other test here relies on it."""
    [verdicts] = ranks.run(strict_check, world_size=1)
    assert all("wrap with gpu_sync_allowed()" in verdict for verdict in verdicts)


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("kind", ["all-to-all", "one-to-one"])
@pytest.mark.parametrize("device, streams", PLACES)
def test_every_byte_arrives(
    ranks: Ranks, device: str, streams: str, kind: str, message: str
) -> None:
    """Under the strict check, both ways and one way."""
    results = ranks.run(
        exchange,
        world_size=2,
        device=device,
        streams=streams,
        kind=kind,
        tensors=MESSAGES[message],
    )
    assert_all_arrived(results)


@pytest.mark.parametrize(
    "kind", ["all-to-all", "one-to-one", "one-to-all", "all-to-one", "nobody"]
)
@pytest.mark.parametrize("device, streams", PLACES)
def test_several_peers(ranks: Ranks, device: str, streams: str, kind: str) -> None:
    """Four ranks that send only, receive only, do both, or have an empty queue."""
    results = ranks.run(
        exchange,
        world_size=4,
        device=device,
        streams=streams,
        kind=kind,
        tensors=MESSAGES["expert"] + MESSAGES["bytes"],
    )
    assert_all_arrived(results)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("device, streams", PLACES)
def test_back_to_back(ranks: Ranks, device: str, streams: str, world_size: int) -> None:
    results = ranks.run(
        exchange,
        world_size=world_size,
        device=device,
        streams=streams,
        kind="all-to-all",
        tensors=MESSAGES["expert"],
        rounds=3,
    )
    assert_all_arrived(results)


@gpu
@pytest.mark.parametrize("streams", ["none", "own"])
@pytest.mark.parametrize(
    "world_size, tensors",
    [
        pytest.param(2, MESSAGES["expert"], id="2-expert"),
        pytest.param(2, HUGE, id="2-128MiB"),
        pytest.param(4, MESSAGES["expert"], id="4-expert"),
    ],
)
def test_pinned_execute_returns_while_the_stream_is_busy(
    ranks: Ranks, world_size: int, tensors: Tensors, streams: str
) -> None:
    """With pageable staging the copies above 64 KiB wait for the long kernel.

    Unpatched, then, the kernel has ended when execute() returns; from 0.30.0 on the
    strict check reports the copy before that.
    """
    results = ranks.run(
        exchange,
        world_size=world_size,
        device="cuda",
        streams=streams,
        kind="all-to-all",
        tensors=tensors,
        delayed=True,
    )
    assert_running(results, [[True]] * world_size)
    # The wait for the sends, and nothing else, is exempt from the strict check.
    assert [result["allowed syncs"] for result in results] == [[1]] * world_size
    assert_all_arrived(results)


@gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_pinned_second_exchange_leaves_the_first_alone(
    ranks: Ranks, world_size: int
) -> None:
    """The copies of both exchanges are still queued when the second one returns.

    So the second received while the copies of the first were to be made: staging that
    it used again would give the first destinations its bytes. With pageable staging
    (unpatched) the first execute() returns only after its kernel and copies.
    """
    results = ranks.run(
        exchange,
        world_size=world_size,
        device="cuda",
        streams="one each",
        kind="all-to-all",
        tensors=MESSAGES["expert"],
        rounds=2,
        delayed=True,
    )
    assert_running(results, [[True, True]] * world_size)
    assert_all_arrived(results)


@gpu
@pytest.mark.parametrize("streams", ["none", "own"])
def test_pinned_back_to_back_on_one_delayed_stream(ranks: Ranks, streams: str) -> None:
    """The second exchange waits for the first, by design, but not for itself.

    With pageable staging (unpatched) it does, and its kernel has ended.
    """
    results = ranks.run(
        exchange,
        world_size=2,
        device="cuda",
        streams=streams,
        kind="all-to-all",
        tensors=MESSAGES["expert"],
        rounds=2,
        delayed=True,
    )
    assert_running(results, [[False, True]] * 2)
    assert_all_arrived(results)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("device, streams", NO_STREAM)
def test_rearrange_moves_every_expert(
    ranks: Ranks, device: str, streams: str, world_size: int
) -> None:
    results = ranks.run(
        rearrange, world_size=world_size, device=device, streams=streams
    )
    assert_all_arrived(results)
    assert all(result["moved"] for result in results)


@gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_pinned_rearrange_returns_while_the_stream_is_busy(
    ranks: Ranks, world_size: int
) -> None:
    """In the last layer every rank receives an expert above 64 KiB.

    With pageable staging (unpatched) its copy waits for the long kernel before it.
    """
    results = ranks.run(
        rearrange, world_size=world_size, device="cuda", streams="none", delayed=True
    )
    assert_running(results, [[True]] * world_size)
    assert_all_arrived(results)
    assert all(result["moved"] for result in results)


# Failures. After each of them the next exchange works, and those that break the
# connections of the group get new groups for it.


def assert_next_exchange_works(
    ranks: Ranks, device: str, streams: str, world_size: int = 2
) -> None:
    results = ranks.run(
        exchange,
        world_size=world_size,
        device=device,
        streams=streams,
        kind="all-to-all",
        tensors=MESSAGES["expert"],
    )
    assert_all_arrived(results)


@pytest.mark.parametrize("device, streams", PLACES)
def test_unknown_peer(ranks: Ranks, device: str, streams: str) -> None:
    """Nothing was sent, so the same group goes on."""
    results = ranks.run(refused_exchange, world_size=2, device=device, streams=streams)
    for result in results:
        assert "rank" in result["error"]
        assert not result["touched"]
    assert_all_arrived(results)


@pytest.mark.parametrize("device, streams", PLACES)
def test_missing_tensor(ranks: Ranks, device: str, streams: str) -> None:
    """A rank that waits for more than is sent says so, and writes nothing."""
    expected = MESSAGES["expert"]
    sender, receiver = ranks.run(
        failing_exchange,
        world_size=2,
        device=device,
        streams=streams,
        sent=expected[:-1],
        expected=expected,
    )
    assert sender["error"] is None
    assert "Timed out" in receiver["error"]
    assert not receiver["touched"]
    assert sender["queue"] == receiver["queue"] == 0
    assert_next_exchange_works(ranks, device, streams)


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="Gloo takes a shorter message for a whole one, without an error",
)
@pytest.mark.parametrize("device, streams", NO_STREAM)
def test_shorter_tensor(ranks: Ranks, device: str, streams: str) -> None:
    _, receiver = ranks.run(
        failing_exchange,
        world_size=2,
        device=device,
        streams=streams,
        sent=[("bfloat16", 4096)],
        expected=[("bfloat16", 8192)],
    )
    assert receiver["error"]


@pytest.mark.parametrize("device, streams", NO_STREAM)
def test_longer_tensor(ranks: Ranks, device: str, streams: str) -> None:
    """Gloo ends the process that receives more than it expects, and says why.

    The sender, which may have sent everything by then, must neither hang nor keep
    its queue.
    """
    sender, receiver = ranks.run(
        failing_exchange,
        world_size=2,
        dead=1,
        device=device,
        streams=streams,
        sent=[("bfloat16", 8192)],
        expected=[("bfloat16", 4096)],
    )
    assert receiver["exit"] == -signal.SIGABRT
    assert "Received data size doesn't match expected size" in receiver["output"]
    assert sender["queue"] == 0
    assert_next_exchange_works(ranks, device, streams)


@pytest.mark.parametrize("device, streams", PLACES)
def test_dead_peer(ranks: Ranks, device: str, streams: str) -> None:
    """One of three ranks dies when its first operation is done."""
    *survivors, dead = ranks.run(
        failing_exchange,
        world_size=3,
        dead=2,
        dying=2,
        device=device,
        streams=streams,
        sent=MESSAGES["expert"],
        expected=MESSAGES["expert"],
    )
    assert dead["exit"] == -signal.SIGKILL
    for survivor in survivors:
        # Its connection is "closed by peer", "reset by peer", or a "Broken pipe".
        assert re.search("by peer|Broken pipe", survivor["error"])
        assert not survivor["touched"]
        assert survivor["queue"] == 0
    assert_next_exchange_works(ranks, device, streams)


if __name__ == RANK:
    serve(globals()["connection"], globals()["log"])
