# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What VLLM_H2D_RACE_CHECK must find, and what it must leave alone.

A planted race is a copy on a stream that a long kernel keeps busy, and then a write to
the memory that it has yet to read. Each has clean twins: the same copy with its source
left alone, and with the write after the copy has run.
"""

import ctypes
import dataclasses
import importlib.metadata
import inspect
import linecache
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm import envs
from vllm.utils import gpu_sync_debug

pytest.importorskip("vllm.utils.h2d_race_check")
from vllm.utils import h2d_race_check
from vllm.utils.h2d_race_check import (
    Difference,
    H2DCopy,
    H2DRaceCheck,
    H2DRaceError,
    PendingCheck,
    find_difference,
    install_h2d_race_check,
    reserve,
)

METHODS = ("copy_", "to", "cuda")
CUDA = torch.device("cuda", 0)
COUNT = 1024  # elements of most sources
DELAY = 600_000_000  # clock cycles of a long kernel, about 0.3 seconds


NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def gpu(test: Callable) -> Callable:
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


@pytest.fixture
def make_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Makes an installed check, and removes it in the end."""
    checks: list[H2DRaceCheck] = []
    # What the strict sync check installs is undone too.
    monkeypatch.setattr(gpu_sync_debug, "_copy_checkers_installed", False, False)
    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, getattr(torch._C.TensorBase, name))

    def make(mode: str = "warn", lag_us: int = 0) -> H2DRaceCheck:
        check = H2DRaceCheck(mode, lag_us)
        check.install()
        checks.append(check)
        if torch.cuda.is_available():
            h2d_race_check._arrival_buffer()  # takes longer than the long kernel
        return check

    yield make
    for check in checks:
        check.remove()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def delay_stream() -> None:
    torch.cuda._sleep(DELAY)


def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Pinned memory of a call's own that counts up from 0."""
    count = int(np.prod(shape or (COUNT,)))
    return torch.arange(count, dtype=dtype).view(shape or COUNT).pin_memory()


def on_gpu(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape or (COUNT,), -1, dtype=dtype, device=CUDA)


# --- Planted races ---
#
# Each yields its destination when the copy is in flight; resumed, it rewrites what the
# copy reads. The line of the copy ends in "the copy".


def write_by_numpy():
    source, destination = numbers(), on_gpu()
    view = source.numpy()
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    view[3] = 99


def write_by_torch():
    source, destination = numbers(), on_gpu()
    destination.copy_(source, True)  # the copy
    yield destination
    source.add_(1)


def write_from_c():
    source, destination = numbers(), on_gpu()
    destination.copy_(source, True)  # the copy
    yield destination
    ctypes.memset(source.data_ptr() + 40, 255, 4)


def freed_and_reused():
    """The allocator does not know that a view made by NumPy is in use."""
    block = numbers(1 << 14)
    address = block.data_ptr()
    source = torch.from_numpy(block.numpy()[1 : COUNT + 1])
    destination = on_gpu()
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    del block, source
    others = []
    while not others or others[-1].data_ptr() != address:
        assert len(others) < 64, "the block was not used again"
        others.append(torch.empty(1 << 14, dtype=torch.int32, pin_memory=True))
        others[-1].fill_(99)


def to_device():
    source = numbers()
    destination = source.to(CUDA, non_blocking=True)  # the copy
    yield destination
    source.zero_()


def to_other_tensor():
    source = numbers()
    destination = source.to(on_gpu(1), True)  # the copy
    yield destination
    source.zero_()


def cuda_method():
    source = numbers()
    destination = source.cuda(non_blocking=True)  # the copy
    yield destination
    source.zero_()


def slice_of_a_buffer():
    source, destination = numbers(), on_gpu()
    destination[5:25].copy_(source[5:25], non_blocking=True)  # the copy
    yield destination[5:25]
    source[7] = 99


def transposed():
    source, destination = numbers(32, 8).t(), on_gpu(32, 8).t()
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    source[1, 2] = 99


def into_strided():
    source, destination = numbers(32, 8), on_gpu(32, 16)[:, ::2]
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    source[1, 2] = 99


def one_row_broadcast():
    source, destination = numbers(8), on_gpu(1, 8)
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    source[2] = 99


def not_a_number():
    """Only the payload of a NaN changes."""
    source = torch.full((8,), torch.nan).pin_memory()
    destination = on_gpu(8, dtype=torch.float32)
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination.view(torch.int32)
    source.view(torch.int32)[2] += 1


def scalar():
    source, destination = numbers(1)[0], on_gpu(1)[0]
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    source.fill_(99)


def parameter():
    source, destination = numbers(dtype=torch.float32), on_gpu(dtype=torch.float32)
    with torch.no_grad():
        wrapped = torch.nn.Parameter(destination)
        wrapped.copy_(source, non_blocking=True)  # the copy
    yield destination
    source[3] = 99


# PyTorch reads these sources while it is called, into staging of its own; should it
# read them later some day, the check must say so.


def converting():
    source, destination = numbers(), on_gpu(dtype=torch.float64)
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    source[3] = 99


def converting_to():
    source = numbers()
    destination = source.to(CUDA, torch.bfloat16, non_blocking=True)  # the copy
    yield destination
    source[3] = 99


def from_strided():
    source, destination = numbers(32, 16)[:, ::2], on_gpu(32, 8)
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    source[1, 2] = 99


def broadcast():
    source, destination = numbers(8), on_gpu(32, 8)
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    source[2] = 99


def pageable():
    source, destination = numbers().clone(), on_gpu()
    destination.copy_(source, non_blocking=True)  # the copy
    yield destination
    source[3] = 99


RACES = (
    write_by_numpy,
    write_by_torch,
    write_from_c,
    freed_and_reused,
    to_device,
    to_other_tensor,
    cuda_method,
    slice_of_a_buffer,
    into_strided,
    one_row_broadcast,
    not_a_number,
    scalar,
    parameter,
)
STAGED = (
    converting,
    converting_to,
    from_strided,
    transposed,
    broadcast,
    pageable,
)
planted_races = pytest.mark.parametrize("plant", RACES, ids=lambda p: p.__name__)
all_copies = pytest.mark.parametrize(
    "plant", RACES + STAGED, ids=lambda plant: plant.__name__
)


def arrived_without_a_race(plant: Callable) -> torch.Tensor:
    """What the destination must hold."""
    destination = next(plant())
    torch.cuda.synchronize()
    return destination.cpu()


def assert_reports(race: Any, plant: Callable, must: torch.Tensor) -> None:
    """`race` tells where the copy is, and what of it did not arrive."""
    filename, line, function = race.copy.stack[-1]
    assert (filename, function) == (__file__, plant.__name__)
    assert linecache.getline(filename, line).endswith("# the copy\n")
    found = race.difference
    if plant is not_a_number:
        assert (found.index, found.count) == ((2,), 1)
    else:
        assert found.expected == must[found.index].item() != found.arrived
        assert 0 < found.count <= race.elements == must.numel()
    text = str(race)
    assert f'File "{__file__}", line {line}, in {plant.__name__}' in text
    assert f"[{', '.join(map(str, must.shape))}] on cuda:0" in text


@gpu
@all_copies
def test_planted(plant: Callable, make_check: Callable) -> None:
    """A race is reported where the destination is wrong, and only there."""
    must = arrived_without_a_race(plant)
    check = make_check()
    delay_stream()
    steps = plant()
    destination = next(steps)
    next(steps, None)
    races = check.check()
    wrong = not torch.equal(destination.cpu(), must)
    assert wrong or plant in STAGED, "nothing was planted"
    assert len(races) == wrong
    for race in races:
        assert_reports(race, plant, must)
    assert check.counts["compared"] == 1


@gpu
@all_copies
@pytest.mark.parametrize("write", [False, True], ids=["left alone", "written later"])
def test_clean_twin(plant: Callable, write: bool, make_check: Callable) -> None:
    check = make_check()
    delay_stream()
    steps = plant()
    next(steps)
    if write:
        torch.cuda.synchronize()
        next(steps, None)
    assert check.check() == []
    assert check.counts == {"compared": 1}


@gpu
@planted_races
@pytest.mark.parametrize("lagged", [False, True])
def test_lag(plant: Callable, lagged: bool, make_check: Callable) -> None:
    """With a lag a race shows on an idle GPU; a clean copy stays clean."""
    check = make_check(lag_us=20_000)
    steps = plant()
    next(steps)
    if not lagged:
        torch.cuda.synchronize()
    next(steps, None)
    assert len(check.check()) == lagged


@gpu
def test_lag_is_about_right(make_check: Callable) -> None:
    make_check(lag_us=20_000)
    source, destination = numbers(), on_gpu()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    destination.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    assert 10 < start.elapsed_time(end) < 40


@gpu
@pytest.mark.parametrize("plant", [write_by_numpy, to_device])
@pytest.mark.parametrize("where", ["stream", "thread"])
def test_elsewhere(plant: Callable, where: str, make_check: Callable) -> None:
    """Copies on another stream or in another thread, and clean ones on this."""
    check = make_check()
    steps = plant()

    def start() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            delay_stream()
            next(steps)

    torch.cuda.synchronize()
    if where == "stream":
        start()
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(start).result()
    clean = write_by_torch()
    next(clean)
    next(steps, None)
    (race,) = check.check()
    assert race.copy.stack[-1][2] == plant.__name__
    assert check.counts["compared"] == 2


@gpu
def test_many_threads(make_check: Callable) -> None:
    """Each with a stream: as many reports as wrong copies, from the right threads."""
    check = make_check()
    barrier = threading.Barrier(8)

    def work(number: int) -> int:
        wrong = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            for _ in range(5):
                delay_stream()
                sources = [torch.full((100,), number).pin_memory() for _ in range(20)]
                copies = [source.to(CUDA, non_blocking=True) for source in sources]
                if number % 2:
                    sources[7].fill_(-1)
                torch.cuda.current_stream().synchronize()
                wrong += bool((copies[7] == -1).any())
        return wrong

    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        wrong = list(pool.map(work, range(8)))
    races = check.check()
    assert check.counts == {"compared": 8 * 5 * 20, "race": sum(wrong)}
    assert all(wrong[1::2]), "nothing was planted"
    for number in range(8):
        mine = [race for race in races if race.difference.expected == number]
        assert len(mine) == wrong[number]
        assert all(race.difference.arrived == -1 for race in mine)


# --- Modes ---


@gpu
def test_error_is_raised_by_the_next_copy(make_check: Callable) -> None:
    check = make_check("error")
    delay_stream()
    steps = write_by_numpy()
    next(steps)
    next(steps, None)
    torch.cuda.synchronize()
    source, destination = numbers(), on_gpu()
    with pytest.raises(H2DRaceError, match="in write_by_numpy") as caught:
        destination.copy_(source, non_blocking=True)
    assert [race.difference.index for race in caught.value.races] == [(3,)]
    # It was raised instead of the copy, and once.
    assert destination.eq(-1).all()
    destination.copy_(source, non_blocking=True)
    assert check.check() == []
    assert torch.equal(destination.cpu(), source)


@gpu
def test_error_is_raised_by_check(make_check: Callable) -> None:
    check = make_check("error")
    delay_stream()
    for steps in (write_by_numpy(), to_device()):
        next(steps)
        next(steps, None)
    with pytest.raises(H2DRaceError, match=r"(?s)in write_by_numpy.*in to_device"):
        check.check()
    assert check.check() == []


class PassedEvent:
    def query(self) -> bool:
        return True


def issue(check: H2DRaceCheck, arrived: int = 1, line: int = 7) -> None:
    """A copy of a 1 that has run, from a line of some file."""
    copy = H2DCopy("Tensor.to", "int64[1]", (("some.py", line, "function"),))
    values = (torch.tensor([1]), torch.tensor([arrived]))
    check._pending.append(
        PendingCheck(copy, torch.device("cpu"), *values, PassedEvent(), 0, 8)
    )


def record_log(monkeypatch: pytest.MonkeyPatch, level: str) -> list[str]:
    """What is logged at a level from now on."""
    said: list[str] = []
    monkeypatch.setattr(
        h2d_race_check.logger, level, lambda text, *args: said.append(text % args)
    )
    return said


def test_warn_says_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first race of a place, the tenth, the hundredth; other places apart."""
    said = record_log(monkeypatch, "warning")
    check = H2DRaceCheck("warn")
    for number in range(150):
        issue(check, arrived=2)
        issue(check, arrived=1)
        if number == 50:
            issue(check, arrived=2, line=8)
    races = check.check()
    assert check.counts == {"compared": 301, "race": 151}
    assert len(races) == h2d_race_check.MAX_RACES
    assert [text.split(":")[0] for text in said] == [
        *("Seen 1 times", "Seen 10 times", "Seen 1 times", "Seen 100 times"),
    ]
    assert "1 of 1 elements differ, the first at (0,): 1 at the call, 2" in said[0]
    assert 'File "some.py", line 8, in function' in said[2]


def test_error_is_logged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone may catch what the next copy raises."""
    said = record_log(monkeypatch, "error")
    check = H2DRaceCheck("error")
    for _ in range(3):
        issue(check, arrived=2)
        with pytest.raises(H2DRaceError):
            check.check()
        assert check.check() == []
    assert [text.split(":")[0] for text in said] == ["Seen 1 times"]


def test_copies_while_the_lock_is_held_are_left_alone() -> None:
    """A finalizer may run at any time, and may copy."""
    check = H2DRaceCheck("warn")
    asked: list[bool] = []

    class FinalizingEvent(PassedEvent):
        def query(self) -> bool:
            asked.append(check._is_inside())
            return True

    issue(check)
    check._pending[0] = dataclasses.replace(check._pending[0], event=FinalizingEvent())
    assert check.check() == []
    assert asked and all(asked) and not check._is_inside()


def end_after_installing(path: str) -> None:
    """Run in a process that was started for it."""
    os.environ["VLLM_H2D_RACE_CHECK"] = "warn"
    os.environ.pop("VLLM_H2D_RACE_LAG_US", None)
    check = install_h2d_race_check.__wrapped__()
    check.check = lambda: Path(path).write_text("checked")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_kind_of_process_reports_at_its_end(method: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context(method)
    process = context.Process(
        target=end_after_installing, args=(str(tmp_path / "end"),)
    )
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert (tmp_path / "end").read_text() == "checked"


def test_exit_reports_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    said = record_log(monkeypatch, "error")
    check = H2DRaceCheck("error")
    issue(check, arrived=2)
    check.check_at_exit()
    assert "2 arrived" in said[0]


# --- On and off ---


def methods() -> list[Any]:
    return [getattr(torch.Tensor, name) for name in METHODS]


@pytest.mark.parametrize("value", [None, ""])
def test_off_wraps_nothing(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_H2D_RACE_CHECK", raising=False)
    else:
        monkeypatch.setenv("VLLM_H2D_RACE_CHECK", value)
    monkeypatch.setenv("VLLM_H2D_RACE_LAG_US", "5")
    monkeypatch.setattr(H2DRaceCheck, "install", lambda _: pytest.fail("installed"))
    before = methods()
    assert install_h2d_race_check.__wrapped__() is None
    assert all(new is old for new, old in zip(methods(), before, strict=True))


def test_vllm_knows_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_H2D_RACE_CHECK", "warn")
    monkeypatch.setenv("VLLM_H2D_RACE_LAG_US", "25")
    for name, value in (("CHECK", "warn"), ("LAG_US", "25")):
        assert envs.environment_variables[f"VLLM_H2D_RACE_{name}"]() == value


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_on_wraps_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[H2DRaceCheck] = []
    monkeypatch.setenv("VLLM_H2D_RACE_CHECK", mode)
    monkeypatch.setenv("VLLM_H2D_RACE_LAG_US", "25")
    monkeypatch.setattr(H2DRaceCheck, "install", lambda self: installed.append(self))
    monkeypatch.setattr(h2d_race_check, "Finalize", lambda *_, **__: None)
    install_h2d_race_check.cache_clear()
    try:
        assert install_h2d_race_check() is install_h2d_race_check()
    finally:
        install_h2d_race_check.cache_clear()
    (check,) = installed
    assert (check.mode, check.lag_us) == (mode, 25)


@pytest.mark.parametrize(
    ("mode", "lag_us", "complaint"),
    [
        ("yes", "0", "VLLM_H2D_RACE_CHECK is 'yes'; set it to 'warn' or 'error'"),
        ("WARN", "0", "VLLM_H2D_RACE_CHECK is 'WARN'"),
        ("warn", "1.5", "VLLM_H2D_RACE_LAG_US is '1.5'; set it to a whole number"),
        ("warn", "-1", "VLLM_H2D_RACE_LAG_US is '-1'"),
        ("warn", "\N{SUPERSCRIPT TWO}", "VLLM_H2D_RACE_LAG_US is"),
    ],
)
def test_bad_settings(
    mode: str, lag_us: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_H2D_RACE_CHECK", mode)
    monkeypatch.setenv("VLLM_H2D_RACE_LAG_US", lag_us)
    before = methods()
    with pytest.raises(ValueError, match=complaint):
        install_h2d_race_check()
    assert methods() == before


def test_remove_puts_everything_back() -> None:
    before = methods()
    inherited = [name in vars(torch.Tensor) for name in METHODS]
    check = H2DRaceCheck("warn")
    check.install()
    assert all(new is not old for new, old in zip(methods(), before, strict=True))
    check.remove()
    assert all(new is old for new, old in zip(methods(), before, strict=True))
    assert [name in vars(torch.Tensor) for name in METHODS] == inherited


def test_worker_installs_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its device is set, and before anything is put on it."""
    from vllm.v1.worker import gpu_worker

    class Installed(Exception):
        pass

    def install() -> None:
        raise Installed

    devices: list[torch.device] = []
    monkeypatch.setattr(gpu_worker, "install_h2d_race_check", install)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    platform = MagicMock()
    platform.logical_device_id_to_visible_device_id = lambda index: index
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(
        gpu_worker,
        "init_worker_distributed_environment",
        lambda *args: pytest.fail("too late"),
    )
    worker = object.__new__(gpu_worker.Worker)
    worker.device_config = SimpleNamespace(device_type="cuda")
    worker.local_rank = 3
    worker.parallel_config = SimpleNamespace(
        assigned_physical_gpu_ids=None,
        distributed_executor_backend="external_launcher",
        get_local_gpu_index=lambda rank: rank,
    )
    with pytest.raises(Installed):
        worker.init_device()
    assert devices == [torch.device("cuda:3")]


# --- What must go on working ---


@gpu
def test_captured_copies_are_left_alone(make_check: Callable) -> None:
    """They read their source at each replay, which is meant."""
    source, destination = numbers(), on_gpu()
    destination.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    check = make_check("error", lag_us=1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        destination.copy_(source, non_blocking=True)
        source.to(CUDA, non_blocking=True)
        source.cuda(non_blocking=True)
    for value in (5, 6):
        source.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert destination.eq(value).all()
    assert check.check() == []
    assert check.counts == {"captured": 3}


@gpu
@pytest.mark.parametrize("first", ["race check", "sync check"])
def test_beside_the_strict_sync_check(
    first: str, make_check: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check makes no sync, and neither hides anything from the other."""
    # Some releases read the mode when they are imported, others later.
    monkeypatch.setenv("VLLM_GPU_SYNC_CHECK", "error")
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error", False)
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", False)
    check = make_check(lag_us=100) if first == "race check" else None
    gpu_sync_debug.enable_gpu_sync_check()
    check = check or make_check(lag_us=100)
    strictly = gpu_sync_debug.with_gpu_sync_check
    values = [numbers(), on_gpu(), numbers()]
    steps = [plant() for plant in (write_by_numpy, to_device, cuda_method)]

    def step() -> None:
        delay_stream()
        for each in steps:
            next(each)
            next(each, None)
        for _ in range(50):
            values[1].copy_(values[0], non_blocking=True)

    strictly(step)()
    torch.cuda.synchronize()
    # What is compared, polled and reported now is the check's own doing.
    strictly(lambda: values[1].copy_(values[0], non_blocking=True))()
    races = strictly(check.check)()
    names = [race.copy.stack[-1][2] for race in races]
    assert names == ["write_by_numpy", "to_device", "cuda_method"]
    assert check.counts["compared"] == 54
    with pytest.raises(RuntimeError, match="sync"):
        strictly(lambda: values[1].sum().item())()
    if hasattr(gpu_sync_debug, "IMPLICIT_SYNC_ERROR_MESSAGE"):
        copy = strictly(lambda: values[1].copy_(values[0].clone(), non_blocking=True))
        with pytest.raises(RuntimeError, match="not pinned"):
            copy()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("sync_check", [False, True])
def test_compiled(
    backend: str,
    device: str,
    sync_check: bool,
    make_check: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo traces the methods as it does without the check, in one graph."""
    if sync_check:
        if not hasattr(gpu_sync_debug, "_install_copy_checkers"):
            pytest.skip("this vLLM's sync check does not wrap copies")
        gpu_sync_debug._install_copy_checkers()
    check = make_check("error")

    def function(source: torch.Tensor) -> torch.Tensor:
        moved = source.to(device, torch.float64, non_blocking=True)
        copied = torch.empty_like(moved)
        copied.copy_(moved, non_blocking=True)
        return moved + copied

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for start in (0.0, 1.0):
        source = torch.arange(start, start + 8)
        assert compiled(source).tolist() == (2 * source).tolist()
    assert check.check() == []


def test_fake_tensors_are_left_alone(make_check: Callable) -> None:
    check = make_check()
    with FakeTensorMode():
        source, destination = torch.ones(4), torch.zeros(4, device="cuda")
        destination.copy_(source, non_blocking=True)
        assert source.to("cuda", non_blocking=True).device.type == "cuda"
    assert torch.ones(4).to("meta", non_blocking=True).is_meta
    assert check.counts == {}


def test_copies_on_the_host_are_left_alone(make_check: Callable) -> None:
    check = make_check()
    source = torch.arange(4)
    assert source.to(torch.float32, non_blocking=True).tolist() == [0, 1, 2, 3]
    assert torch.zeros(4).copy_(source, non_blocking=True).tolist() == [0, 1, 2, 3]
    assert source.to("cpu") is source
    with pytest.raises(TypeError):
        source.to("cpu", nonsense=True)
    with pytest.raises(RuntimeError):
        torch.zeros(3).copy_(source, non_blocking=True)
    assert check.counts == {}


class Labelled(torch.nn.Parameter):
    """A parameter with a class of its own, as quantized weights have."""


@gpu
def test_other_copies_are_left_alone(
    make_check: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocking ones, empty ones, those between devices or back, subclasses, weights."""
    source, destination = numbers(), on_gpu()
    labelled = Labelled(on_gpu(dtype=torch.float32), requires_grad=False)
    check = make_check(lag_us=10)
    destination.copy_(source)
    source.to(CUDA)
    source.cuda()
    destination.to("cpu", non_blocking=True)
    source.copy_(destination, non_blocking=True)
    destination.copy_(destination + 1, non_blocking=True)
    destination[:0].copy_(source[:0], non_blocking=True)
    labelled.copy_(source, non_blocking=True)
    with pytest.raises(RuntimeError):
        destination.copy_(source[:3], non_blocking=True)
    assert check.check() == []
    assert check.counts == {}
    monkeypatch.setattr(h2d_race_check, "MAX_COPY_BYTES", 4 * COUNT - 1)
    destination.copy_(source, non_blocking=True)
    destination[1:].copy_(source[1:], non_blocking=True)
    assert check.check() == []
    assert check.counts == {"large": 1, "compared": 1}


@gpu
def test_modes_of_torch(make_check: Callable) -> None:
    """Inference mode, a default device, gradients: the check's tensors fit in."""
    check = make_check()
    source, destination = numbers(dtype=torch.float32), on_gpu(dtype=torch.float32)
    with torch.inference_mode():
        destination.copy_(source, non_blocking=True)
        source.to(CUDA, non_blocking=True)
    destination.copy_(source, non_blocking=True)
    with torch.device(CUDA):
        destination.copy_(source, non_blocking=True)
        source.cuda(non_blocking=True)
    moved = source.requires_grad_().to(CUDA, non_blocking=True)
    moved.sum().backward()
    assert source.grad.eq(1).all()
    assert check.check() == []
    assert check.counts["compared"] == 6


@gpu
def test_full_ring_waits(make_check: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than ARRIVAL_BYTES are kept, and nothing is lost."""
    monkeypatch.setattr(h2d_race_check, "ARRIVAL_BYTES", 10 * 4 * COUNT)
    check = make_check()
    destination = on_gpu()
    sources = [numbers() for _ in range(35)]
    torch.cuda.synchronize()
    delay_stream()
    for number, source in enumerate(sources):
        destination.copy_(source, non_blocking=True)
        assert len(check._pending) <= 10
        if number == 4:
            source[3] = 99
    (race,) = check.check()
    assert race.difference.index == (3,)
    assert check.counts["compared"] == 35


# --- FlashInfer ---

HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 128, 16
DTYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
# KV lengths of two batches whose schedules differ.
FIRST = [3000 + 97 * i for i in range(8)]
SECOND = [40 + 211 * i for i in range(8)]
PLANNERS = ("decode", "fast decode", "paged prefill", "ragged prefill", "mla")


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32).pin_memory()


def make_planner(kind: str) -> Callable[[list[int]], Any]:
    """Plans batches of these KV lengths with one wrapper, which it returns."""
    import flashinfer
    import flashinfer.mla

    buffer = torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA)
    queries = offsets([4] * 8)

    def paged(lengths: list[int]) -> tuple[torch.Tensor, ...]:
        pages = [-(-length // PAGE) for length in lengths]
        last = torch.tensor([length % PAGE or PAGE for length in lengths])
        indices = torch.arange(sum(pages), dtype=torch.int32, device=CUDA)
        return offsets(pages), indices, last.int().pin_memory()

    heads = (HEADS, KV_HEADS, HEAD_DIM)
    if kind == "mla":
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(buffer, backend="fa2")

        def plan(lengths: list[int]) -> None:
            lens = torch.tensor(lengths, dtype=torch.int32).pin_memory()
            indices = torch.arange(sum(lengths), dtype=torch.int32, device=CUDA)
            wrapper.plan(
                *(offsets([1] * 8), offsets(lengths), indices, lens),
                *(16, 512, 64, 1, False, 0.1, torch.bfloat16, torch.bfloat16),
            )

    elif kind == "ragged prefill":
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer, backend="fa2")

        def plan(lengths: list[int]) -> None:
            wrapper.plan(queries, offsets(lengths), *heads, **DTYPES)

    elif kind == "paged prefill":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, backend="fa2")

        def plan(lengths: list[int]) -> None:
            wrapper.plan(queries, *paged(lengths), *heads, PAGE, **DTYPES)

    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            buffer, use_tensor_cores=True, backend="fa2"
        )

        def plan(lengths: list[int]) -> None:
            if kind == "decode" or getattr(wrapper, "_plan_info", None) is None:
                wrapper.plan(*paged(lengths), *heads, PAGE, **DTYPES)
            else:
                flashinfer.decode.fast_decode_plan(
                    wrapper, *paged(lengths), *heads, PAGE, **DTYPES
                )

    def plan_one(lengths: list[int]) -> Any:
        plan(lengths)
        return wrapper

    return plan_one


@cache
def compile_planners() -> None:
    """The MLA planner has kernels of its own, the others share theirs."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda kind: make_planner(kind)(FIRST), ("decode", "mla")))
    torch.cuda.synchronize()


@gpu
@pytest.mark.parametrize("kind", PLANNERS)
@pytest.mark.parametrize("how", ["in flight", "one by one", "guarded"])
def test_flashinfer_plans(kind: str, how: str, make_check: Callable) -> None:
    """Two plans in flight share a workspace, except those that MLA stages since 0.7."""
    pytest.importorskip("flashinfer")
    version = importlib.metadata.version("flashinfer-python").split(".")
    staged = kind == "mla" and (int(version[0]), int(version[1])) >= (0, 7)
    compile_planners()
    plan = make_planner(kind)
    wrapper = plan(FIRST)  # before the check is there
    check = make_check()
    plan(SECOND)
    torch.cuda.synchronize()
    assert check.check() == []
    compared = check.counts["compared"]
    assert compared, "no plan was seen"

    delay_stream()
    for lengths in (FIRST, SECOND):
        if how == "guarded":
            guard = pytest.importorskip("vllm.utils.flashinfer_plan_guard")
            with guard.plan_guard(wrapper):
                plan(lengths)
        else:
            plan(lengths)
        if how == "one by one":
            torch.cuda.synchronize()
    races = check.check()
    assert check.counts["compared"] >= compared + 2
    if how == "in flight" and not staged:
        (race,) = races
        assert race.copy.operation == "FlashInfer's plan"
        assert race.difference.expected != race.difference.arrived
        assert any(frame[2] == "plan_one" for frame in race.copy.stack)
    else:
        assert races == []


class Planner:
    """A planner module that fills as much of the workspaces as it is told."""

    run = "the module's own"

    def plan(self, floats: Any, workspace: Any, pinned: Any, used: int) -> list[int]:
        assert not pinned.any()
        pinned[:used] = 7
        workspace[:used] = pinned[:used]
        return [used]


def test_planner_is_the_module_but_for_plan(make_check: Callable) -> None:
    class Wrapper:
        _cached_module: Any

    check = make_check()
    check._patch(Wrapper, "_cached_module", h2d_race_check._PlannerAttribute(check))
    wrapper, other = Wrapper(), Wrapper()
    assert not hasattr(wrapper, "_cached_module")
    wrapper._cached_module = None
    assert wrapper._cached_module is None
    wrapper._cached_module = planner = Planner()
    assert wrapper._cached_module.run == "the module's own"
    # Handed on, it is still checked once.
    other._cached_module = wrapper._cached_module
    assert vars(other)["_cached_module"] is planner
    # Without workspaces, or without a GPU, it is called as it is.
    pinned = torch.zeros(64, dtype=torch.uint8)
    assert other._cached_module.plan(None, pinned.clone(), pinned, 5) == [5]


def test_planners_are_found() -> None:
    """In the installed FlashInfer, whichever of its methods does the planning."""
    flashinfer = pytest.importorskip("flashinfer")
    assert h2d_race_check._planning_wrappers() >= {
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    }
    fast_decode_plan = inspect.unwrap(flashinfer.decode.fast_decode_plan)
    assert "_cached_module" in fast_decode_plan.__code__.co_names


# --- Parts ---


@pytest.mark.parametrize("used", [0, 1, 8, 4095, 4096, 4097, 9999, 10_000])
def test_bytes_used(used: int) -> None:
    pinned = torch.zeros(10_000, dtype=torch.uint8)
    pinned[: used // 2 : 3] = 5
    if used:
        pinned[used - 1] = 1
    assert h2d_race_check._bytes_used(pinned) == used


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int64, torch.uint16, torch.complex64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn),
    ],
)
def test_find_difference(dtype: torch.dtype) -> None:
    expected = torch.ones(3, 4, 5).to(dtype)
    arrived = expected.clone()
    assert find_difference(expected, arrived) is None
    assert find_difference(expected[0, :1], arrived) is None
    for index in ((2, 3, 4), (1, 2, 3), (2, 0, 0)):
        arrived[index] = 0
    one, zero = expected[0, 0, 0].item(), arrived[1, 2, 3].item()
    assert find_difference(expected, arrived) == Difference((1, 2, 3), one, zero, 3)


def test_find_difference_broadcasts() -> None:
    for shape in ((1,), (1, 1), (3,), (2, 1, 2)):
        arrived = torch.ones(shape)
        assert find_difference(torch.tensor(1.0), arrived) is None
        assert find_difference(torch.tensor(2.0), arrived).count == arrived.numel()


def test_find_difference_compares_bytes() -> None:
    nan = torch.tensor([torch.nan])
    assert find_difference(nan, nan.clone()) is None
    other = (nan.view(torch.int32) + 1).view(torch.float32)
    assert find_difference(nan, other).count == 1
    assert find_difference(torch.tensor(0.0), torch.tensor(-0.0)).index == ()


@pytest.mark.parametrize("seed", range(20))
def test_ring(seed: int) -> None:
    """Reservations are disjoint, inside, and refused only where there is no room."""
    rng = np.random.default_rng(seed)
    capacity, alignment = 4096, h2d_race_check.ALIGNMENT
    largest = capacity // 3
    pending: deque[Any] = deque()
    for size in rng.integers(1, largest, 500):
        while (start := reserve(pending, int(size), capacity)) is None:
            held = sum(each.end - each.start for each in pending)
            # Lost are less than a largest piece at the end, and a line for each.
            lost = largest + alignment * (len(pending) + 1)
            assert held + size + lost > capacity
            pending.popleft()
        end = start + int(size)
        assert start % alignment == 0 and end <= capacity
        assert all(end <= each.start or each.end <= start for each in pending)
        pending.append(SimpleNamespace(start=start, end=end))
        while pending and rng.random() < 0.3:
            pending.popleft()


@pytest.mark.parametrize(
    ("args", "kwargs", "asynchronous"),
    [
        (("cuda",), {"non_blocking": True}, True),
        (("cuda:1", torch.float16, True), {}, True),
        ((), {"device": "cuda", "non_blocking": True}, True),
        (("cuda", torch.float16), {"non_blocking": True, "copy": True}, True),
        (("cuda", torch.float16, True, True), {}, True),
        (("cuda:1", None, True, True), {}, True),
        (("cuda", None, False, True), {}, False),
        (("cuda",), {}, False),
        (("cpu",), {"non_blocking": True}, False),
        ((torch.float16,), {"non_blocking": True}, False),
        ((torch.float16, True), {}, False),
        ((torch.ones(1), True), {}, False),
        (("nonsense",), {"non_blocking": True}, False),
        (("cuda",), {"nonsense": True}, False),
    ],
)
def test_forms_of_to(
    args: tuple, kwargs: dict, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    source = torch.ones(3, dtype=torch.float64)
    request = h2d_race_check._to_request(source, args, kwargs)
    assert (request is not None) == asynchronous
    if request is not None:
        assert request.source is source
        assert request.device == torch.device("cuda", int("cuda:1" in args))
        half = torch.float16 in args
        assert request.dtype == (torch.float16 if half else torch.float64)
        assert request.elements == 3


@pytest.mark.parametrize(
    ("args", "kwargs", "index"),
    [
        ((None, True), {}, 0),
        ((1, True), {}, 1),
        ((), {"device": "cuda:1", "non_blocking": True}, 1),
        ((torch.device("cuda"),), {"non_blocking": True}, 0),
        ((), {}, None),
        ((1,), {}, None),
    ],
)
def test_forms_of_cuda(
    args: tuple, kwargs: dict, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    request = h2d_race_check._cuda_request(torch.ones(3), args, kwargs)
    device = request and request.device
    assert device == (None if index is None else torch.device("cuda", index))
