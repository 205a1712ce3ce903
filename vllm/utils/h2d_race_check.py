# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Detect host memory that is rewritten while an asynchronous copy still reads it.

A host-to-device copy with `non_blocking=True` reads its pinned source when the stream
gets there. If the source is written before that (through torch, NumPy or C++, or by the
next owner of a freed block), the GPU gets the later bytes. This check keeps what the
source of each copy held at the call, copies what arrived back to the host behind it on
the same stream, and compares the bytes once they are there.

Off unless `VLLM_H2D_RACE_CHECK` is set:

- `warn`: a race is logged, with the stack of the copy;
- `error`: `H2DRaceError` is raised by the next copy, or by `H2DRaceCheck.check()`.

`VLLM_H2D_RACE_LAG_US` delays the copying stream by so many microseconds before each
copy, so that a race which needs a busy GPU shows on an idle one.

Seen are `Tensor.copy_`, `Tensor.to` and `Tensor.cuda`, and the page-locked workspaces
that FlashInfer's planners copy from. Not seen are copies of more than
`MAX_COPY_BYTES`, copies that a CUDA graph captures or a compiled graph issues, other
copies made by C++ or through CUDA's own API, tensors of other subclasses than
parameters, and kernels and copies that read host memory through an address of the GPU
(UVA). A source that the GPU itself fills in stream order, without a wait of the host,
is reported as rewritten. Where a race ends in an illegal memory access, CUDA's error
comes first, and nothing is reported.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from types import FrameType, FunctionType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.utils import gpu_sync_debug

logger = init_logger(__name__)

Mode = Literal["warn", "error"]
# Filename, line and function of each frame, the outermost first.
Stack = tuple[tuple[str, int, str], ...]

# Pinned memory for what has arrived and is not compared yet; at most as much pageable
# memory holds what is expected. Where it is full, the host waits for the oldest copy.
ARRIVAL_BYTES = 256 * 1024**2
# Larger copies are left alone: they are weights, which nothing rewrites.
MAX_COPY_BYTES = ARRIVAL_BYTES // 4
# A multiple of every element size, and a cache line.
ALIGNMENT = 64
# Innermost frames of a stack that are kept.
MAX_FRAMES = 32
# Races that `check()` can return; those before them were logged.
MAX_RACES = 100
# Pieces in which a workspace is searched for its end.
PAGE_BYTES = 4096
# Cycles of `torch.cuda._sleep` that calibrate it, some 10 ms.
CALIBRATION_CYCLES = 20_000_000

# Neither this check nor `VLLM_GPU_SYNC_CHECK` looks at the detector's own copies.
_copy_ = torch._C.TensorBase.copy_

# Frames that are between a copy and whoever asked for it.
_OWN_FILES = (__file__, gpu_sync_debug.__file__)

_PLANNER_MODULES = ("decode", "prefill", "mla", "sparse", "pod")
_PINNED_WORKSPACE = "_pin_memory_int_workspace_buffer"


@dataclass(frozen=True)
class H2DCopy:
    """A copy as it was asked for, in words.

    Attributes:
        operation: What was called, such as `Tensor.copy_`.
        source: Dtype and shape of the host tensor.
        stack: Where it was called.

    """

    operation: str
    source: str
    stack: Stack


@dataclass(frozen=True)
class PendingCheck:
    """A copy that was issued and is not compared yet.

    Attributes:
        copy: What was asked for.
        device: The device that is copied to.
        expected: What the source held at the call, in the destination's dtype; on the
            host, in memory of its own. It broadcasts to the destination's shape.
        arrived: What is on the device behind the copy; valid once `event` has passed.
        start: Offset of `arrived` in the arrival buffer, in bytes.
        end: Where it ends there.

    """

    copy: H2DCopy
    device: torch.device
    expected: torch.Tensor
    arrived: torch.Tensor
    event: torch.cuda.Event
    start: int
    end: int


@dataclass(frozen=True)
class Difference:
    """Where two tensors of one shape differ.

    Attributes:
        index: Of the first element that differs.
        expected: That element in the first tensor.
        arrived: That element in the second tensor.
        count: How many elements differ.

    """

    index: tuple[int, ...]
    expected: Any
    arrived: Any
    count: int


@dataclass(frozen=True)
class H2DRace:
    """A copy whose destination is not what the source held at the call.

    Attributes:
        copy: What was asked for.
        destination: Dtype, shape and device of the destination, in words.
        elements: How many it has.
        difference: Where what arrived differs from what the source held.

    """

    copy: H2DCopy
    destination: str
    elements: int
    difference: Difference

    def __str__(self) -> str:
        copy, found = self.copy, self.difference
        frames = [(*frame, None) for frame in copy.stack]
        stack = "".join(traceback.StackSummary.from_list(frames).format())
        return (
            f"the source of {copy.operation} was rewritten before the copy had run "
            f"({copy.source} to {self.destination}): "
            f"{found.count} of {self.elements} elements differ, the first at "
            f"{found.index}: {found.expected} at the call, {found.arrived} arrived. "
            "Give each copy pinned memory of its own, or wait for an event behind the "
            f"copy before writing. The copy was issued here:\n{stack}"
        )


class H2DRaceError(RuntimeError):
    """Raised in mode `error`.

    Attributes:
        races: The races found since the last error.

    """

    def __init__(self, races: list[H2DRace]) -> None:
        super().__init__("\n".join(map(str, races)))
        self.races = races


def find_difference(expected: torch.Tensor, arrived: torch.Tensor) -> Difference | None:
    """The first difference between two host tensors, None if they are the same.

    Bytes are compared, so a NaN is the same as itself, and 0.0 differs from -0.0.

    Args:
        expected: Of any shape that broadcasts to that of `arrived`.
        arrived: Contiguous, of the dtype of `expected`, not empty.

    """
    expected = _copy_(torch.empty_like(arrived), expected)
    bytes_expected = expected.view(-1).view(torch.uint8)
    bytes_arrived = arrived.view(-1).view(torch.uint8)
    if torch.equal(bytes_expected, bytes_arrived):
        return None
    differs = (bytes_expected != bytes_arrived).view(arrived.numel(), -1).any(dim=1)
    first = int(differs.nonzero()[0])
    return Difference(
        index=tuple(int(i) for i in np.unravel_index(first, arrived.shape)),
        expected=expected.view(-1)[first].item(),
        arrived=arrived.view(-1)[first].item(),
        count=int(differs.sum()),
    )


def reserve(pending: deque[PendingCheck], size: int, capacity: int) -> int | None:
    """Offset of `size` free bytes in a ring of `capacity`, None where it is full.

    Args:
        pending: What holds bytes of the ring, the oldest first.
        size: In bytes, at most `capacity`.
        capacity: Size of the ring, in bytes.

    """
    if not pending:
        return 0
    oldest, newest = pending[0], pending[-1]
    start = -(-newest.end // ALIGNMENT) * ALIGNMENT
    if newest.start < oldest.start:  # wrapped around
        return start if start + size <= oldest.start else None
    if start + size <= capacity:
        return start
    return 0 if size <= oldest.start else None


@functools.cache
def install_h2d_race_check() -> "H2DRaceCheck | None":
    """Install the check if `VLLM_H2D_RACE_CHECK` asks for it, once in a process.

    To be called when the device is set, before anything is put on it.

    Raises:
        ValueError: `VLLM_H2D_RACE_CHECK` or `VLLM_H2D_RACE_LAG_US` cannot be read.

    """
    # Not through `vllm.envs`, which knows them: they are read once, and only here.
    mode = os.environ.get("VLLM_H2D_RACE_CHECK")
    lag_us = os.environ.get("VLLM_H2D_RACE_LAG_US") or "0"
    if not mode:
        return None
    if mode not in ("warn", "error"):
        raise ValueError(
            f"VLLM_H2D_RACE_CHECK is '{mode}'; set it to 'warn' or 'error', or unset it"
        )
    if not (lag_us.isascii() and lag_us.isdigit()):
        raise ValueError(
            f"VLLM_H2D_RACE_LAG_US is '{lag_us}'; "
            "set it to a whole number of microseconds, or unset it"
        )
    check = H2DRaceCheck(mode, int(lag_us))  # type: ignore[arg-type]
    check.install()
    # Not atexit, which processes that were forked pass over.
    Finalize(None, check.check_at_exit, exitpriority=100)
    logger.warning(
        "Checking host-to-device copies for races (VLLM_H2D_RACE_CHECK=%s, lag %s us): "
        "every copy takes longer.",
        mode,
        lag_us,
    )
    return check


class H2DRaceCheck:
    """Watches the copies of this process; holds all that the check knows.

    Usable from any thread and stream.
    """

    def __init__(self, mode: Mode, lag_us: int = 0) -> None:
        """Make a check that is not installed yet.

        Args:
            mode: "warn" to log a race, "error" to raise it.
            lag_us: Delay of the stream before each copy, in microseconds. Right to
                about 20%: it counts cycles of a clock that follows load and power.

        """
        self.mode = mode
        self.lag_us = lag_us
        # Copies, by what became of them: "compared", "race", "captured", "large".
        self.counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._pending: deque[PendingCheck] = deque()
        self._races: deque[H2DRace] = deque(maxlen=MAX_RACES)
        # How many races each copy, told by its stack, has had.
        self.seen: dict[Stack, int] = {}
        self._patched: list[tuple[Any, str, Any]] = []

    # Installing.

    def install(self) -> None:
        """Watch the copies of tensors and FlashInfer's plans from now on."""
        if self.lag_us:
            _cycles_per_us()
        self._watch_tensor("copy_", _copy_request)
        self._watch_tensor("to", _to_request)
        self._watch_tensor("cuda", _cuda_request)
        for wrapper in _planning_wrappers():
            self._patch(wrapper, "_cached_module", _PlannerAttribute(self))

    def remove(self) -> None:
        """Undo `install()`, the last first."""
        for owner, name, before in reversed(self._patched):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._patched.clear()

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        # An attribute that a class inherits is taken away again, not set to itself.
        self._patched.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def _watch_tensor(self, name: str, request: "ReadRequest") -> None:
        """Watch the method `name`, below the strict sync check if vLLM has that.

        `gpu_sync_debug` looked up the methods when it was imported, and calls those:
        ours goes there too, or the sync check would bypass it once it is installed.
        """
        below = f"_torch_{name}"
        checked = getattr(gpu_sync_debug, f"_checked_{name}", None)
        if getattr(torch.Tensor, name) is checked is not None:
            watched = self._watched(name, request, getattr(gpu_sync_debug, below))
        else:
            watched = self._watched(name, request, getattr(torch.Tensor, name))
            self._patch(torch.Tensor, name, watched)
        if hasattr(gpu_sync_debug, below):
            self._patch(gpu_sync_debug, below, watched)

    def _watched(
        self, name: str, read_request: "ReadRequest", original: Callable
    ) -> Callable:
        # Not every release's Dynamo traces a call of a saved method descriptor.
        @torch.compiler.allow_in_graph
        def in_graph(tensor, *args, **kwargs):
            return original(tensor, *args, **kwargs)

        @functools.wraps(original)
        def watched(tensor, *args, **kwargs):
            if torch.compiler.is_compiling():
                return in_graph(tensor, *args, **kwargs)
            request = None
            # A mode of torch's, such as a default device, calls the method again.
            if not self._is_inside():
                request = read_request(tensor, args, kwargs)
            if request is None or not self._can_check(request):
                return original(tensor, *args, **kwargs)
            copy, expected = self._begin(f"Tensor.{name}", request)
            with self._inside():
                result = original(tensor, *args, **kwargs)
            self._follow(copy, expected, result)
            return result

        return watched

    def _is_inside(self) -> bool:
        return getattr(self._thread, "inside", False)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Copies that this thread makes meanwhile are not looked at."""
        before = self._is_inside()
        self._thread.inside = True
        try:
            yield
        finally:
            self._thread.inside = before

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock. A finalizer may run while it is held, and may copy."""
        with self._inside(), self._lock:
            yield

    # Checking one copy.

    def _can_check(self, request: "CopyRequest") -> bool:
        """Whether real memory is copied, now, and not too much of it."""
        if request.elements == 0 or torch._C._len_torch_dispatch_stack():
            return False
        if request.elements * request.dtype.itemsize > MAX_COPY_BYTES:
            self._count("large")
            return False
        return not self._is_captured(request.device)

    def _is_captured(self, device: torch.device) -> bool:
        """Whether a copy would be captured: it runs when the graph is replayed."""
        with torch.cuda.device(device):
            captured = torch.cuda.is_current_stream_capturing()
        if captured:
            self._count("captured")
        return captured

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1
            if what in ("captured", "large") and self.counts[what] == 1:
                logger.debug("A %s copy is not checked, nor are those to come.", what)

    def _begin(
        self, operation: str, request: "CopyRequest"
    ) -> tuple[H2DCopy, torch.Tensor]:
        """Before a copy: raise what was found, look at the source, delay the stream."""
        self._poll()
        source = request.source
        expected = torch.empty(source.shape, dtype=request.dtype, device="cpu")
        _copy_(expected, source.detach())
        self._delay(request.device)
        return H2DCopy(operation, _in_words(source), _stack()), expected

    def _delay(self, device: torch.device) -> None:
        if self.lag_us:
            with torch.cuda.device(device):
                torch.cuda._sleep(int(self.lag_us * _cycles_per_us()))

    def _follow(
        self, copy: H2DCopy, expected: torch.Tensor, destination: torch.Tensor
    ) -> None:
        """Behind a copy, on its stream: copy what arrived to pinned memory."""
        size = destination.numel() * destination.element_size()
        device = destination.device
        with self._locked(), torch.cuda.device(device):
            start = self._make_room(size)
            arrived = _arrival_buffer()[start : start + size]
            arrived = arrived.view(destination.dtype).view(destination.shape)
            # The destination may be freed and its memory taken again before this runs:
            # the stream keeps the order, as it does for the copy itself.
            _copy_(arrived, destination.detach(), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending.append(
                PendingCheck(
                    copy, device, expected, arrived, event, start, start + size
                )
            )

    def _make_room(self, size: int) -> int:
        while (start := reserve(self._pending, size, ARRIVAL_BYTES)) is None:
            self._compare_oldest()
        return start

    # Comparing.

    def check(self) -> list[H2DRace]:
        """Wait for every copy issued so far, and compare it.

        Returns:
            Mode "warn": the races found since the last call, the latest 100 at most.

        Raises:
            H2DRaceError: mode "error", and there are such races.

        """
        with self._locked():
            while self._pending:
                self._compare_oldest()
            self._raise_races()
            races = list(self._races)
            self._races.clear()
        return races

    def check_at_exit(self) -> None:
        """`check()`, with the races logged: an error would go nowhere."""
        try:
            self.check()
        except H2DRaceError as error:
            logger.error("%s", error)
        except RuntimeError:  # CUDA's own, which has been reported
            logger.debug("The last copies could not be checked.", exc_info=True)
        logger.info("Host-to-device copies: %s", dict(self.counts))

    def _poll(self) -> None:
        """Compare what has arrived; in mode "error", raise the races found so far."""
        with self._locked():
            while self._pending and self._pending[0].event.query():
                self._compare_oldest()
            self._raise_races()

    def _compare_oldest(self) -> None:
        pending = self._pending[0]
        # Not Event.synchronize(): that would count as a sync of the program.
        while not pending.event.query():
            time.sleep(20e-6)
        self._pending.popleft()
        self._count("compared")
        arrived = pending.arrived
        difference = find_difference(pending.expected, arrived)
        if difference is not None:
            destination = f"{_in_words(arrived)} on {pending.device}"
            self._report(
                H2DRace(pending.copy, destination, arrived.numel(), difference)
            )

    def _report(self, race: H2DRace) -> None:
        self._count("race")
        self._races.append(race)
        stack = race.copy.stack
        count = self.seen[stack] = self.seen.get(stack, 0) + 1
        # Once from one place, and then at 10, 100, 1000 ...
        # Also before an error is raised, which someone may catch.
        if str(count).strip("0") == "1":
            say = logger.warning if self.mode == "warn" else logger.error
            say("Seen %d times: %s", count, race)

    def _raise_races(self) -> None:
        if self.mode == "error" and self._races:
            races = list(self._races)
            self._races.clear()
            raise H2DRaceError(races)

    # FlashInfer.

    def plan(self, planner: Callable, *args: Any) -> Any:
        """`planner(*args)`, with the copy of the workspace that it makes checked.

        A planner is called with a float workspace on the device, an integer workspace
        there, and a page-locked one: (bytes,) uint8 each. It fills the last from its
        start, and copies as much as it has filled to the one before.
        """
        if not (
            len(args) > 2
            and all(isinstance(arg, torch.Tensor) for arg in args[1:3])
            and args[1].is_cuda
            and not args[2].is_cuda
            and not self._is_inside()
            and not self._is_captured(args[1].device)
        ):
            return planner(*args)
        workspace, pinned = args[1:3]
        self._poll()
        # How much is copied is not told; with zeros before it, at least as much as up
        # to the last byte that is not zero. Kernels take a zero in a gap for the first
        # request or page. Where a copy of an earlier plan still has to read here, the
        # planner would write too early as well: no report that is not due.
        pinned.numpy().fill(0)
        self._delay(workspace.device)
        result = planner(*args)
        if used := _bytes_used(pinned):
            source = pinned[:used]
            copy = H2DCopy("FlashInfer's plan", _in_words(source), _stack())
            self._follow(copy, source.clone(), workspace[:used])
        return result


# What is asked for.


class CopyRequest(NamedTuple):
    """What an asynchronous host-to-device copy was asked for.

    Attributes:
        source: The host tensor.
        device: The device that is copied to.
        dtype: Of the destination.
        elements: Of the destination.

    """

    source: torch.Tensor
    device: torch.device
    dtype: torch.dtype
    elements: int


# From the tensor, the arguments and the keyword arguments of a method; None where that
# does not copy from the host to a device, or waits.
ReadRequest = Callable[[torch.Tensor, tuple, dict], CopyRequest | None]


def _bind(names: tuple[str, ...], args: tuple, kwargs: dict) -> list[Any]:
    """The arguments of these names, which lead the signature; None where not given."""
    given = dict(zip(names, args, strict=False))
    return [given.get(name, kwargs.get(name)) for name in names]


def _copy_request(tensor, args, kwargs):
    """Of `copy_(src, non_blocking=False)`; some releases of torch call it `other`."""
    source, non_blocking = _bind(("src", "non_blocking"), args, kwargs)
    if source is None:
        source = kwargs.get("other")
    if not non_blocking or not _is_plain(tensor) or not _is_plain(source):
        return None
    if not tensor.is_cuda or not source.is_cpu:
        return None
    return CopyRequest(source, tensor.device, tensor.dtype, tensor.numel())


def _to_request(tensor, args, kwargs):
    """Of `to(...)` in any of its forms."""
    if not _is_plain(tensor) or not tensor.is_cpu:
        return None
    # What parses the arguments of Module.to() knows all but `copy`.
    kwargs = {name: value for name, value in kwargs.items() if name != "copy"}
    for given in (args, args[:-1]):
        try:
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*given, **kwargs)
            break
        except (RuntimeError, TypeError):  # `to` itself says what is wrong
            pass
    else:
        return None
    if not non_blocking or device is None or device.type != "cuda":
        return None
    return CopyRequest(
        tensor, _with_index(device), dtype or tensor.dtype, tensor.numel()
    )


def _cuda_request(tensor, args, kwargs):
    """Of `cuda(device=None, non_blocking=False)`."""
    device, non_blocking = _bind(("device", "non_blocking"), args, kwargs)
    if not non_blocking or not _is_plain(tensor) or not tensor.is_cpu:
        return None
    return CopyRequest(tensor, _with_index(device), tensor.dtype, tensor.numel())


def _with_index(device: torch.device | str | int | None) -> torch.device:
    """The CUDA device that `device` is, the current one if it does not say."""
    index = device if isinstance(device, int) else None
    if isinstance(device, torch.device | str):
        index = torch.device(device).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _is_plain(value: Any) -> bool:
    """Whether `value` is a tensor with memory, and of no subclass but a parameter."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
    )


# What is said and measured.


def _in_words(tensor: torch.Tensor) -> str:
    shape = ", ".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"


def _stack() -> Stack:
    """Where the check was called from, without its own frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    frames = []
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(reversed(frames))


@functools.cache
def _arrival_buffer() -> torch.Tensor:
    """Pinned memory of the check's own: (ARRIVAL_BYTES,) uint8.

    The blocks that the program's copies get from the caching host allocator stay those
    that they get without the check.
    """
    with torch.inference_mode(False):  # else it could not be written outside of it
        return torch.empty(
            ARRIVAL_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
        )


@functools.cache
def _cycles_per_us() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CALIBRATION_CYCLES)  # raises the clock
    start.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    while not end.query():
        time.sleep(1e-3)
    return CALIBRATION_CYCLES / (start.elapsed_time(end) * 1e3)


# FlashInfer's planners.


def _planning_wrappers() -> set[type]:
    """Classes of FlashInfer that hand a page-locked workspace to a planner."""
    if importlib.util.find_spec("flashinfer") is None:
        return set()
    wrappers = set()
    for name in _PLANNER_MODULES:
        try:
            module = importlib.import_module(f"flashinfer.{name}")
        except ImportError as error:
            logger.debug("Plans of flashinfer.%s are not checked: %s", name, error)
            continue
        wrappers |= {
            value
            for value in vars(module).values()
            if isinstance(value, type) and _plans_from_pinned(value)
        }
    names = ", ".join(sorted(wrapper.__name__ for wrapper in wrappers))
    if names:
        logger.debug("Plans of these FlashInfer wrappers are checked: %s", names)
    else:
        logger.warning("This FlashInfer plans in a way that cannot be checked.")
    return wrappers


def _plans_from_pinned(wrapper: type) -> bool:
    """Whether a method calls `self._cached_module.plan` with a page-locked workspace.

    Where none does, the wrapper has no such workspace, or copies it with `copy_`.
    """
    for value in vars(wrapper).values():
        if isinstance(value, FunctionType):
            names = inspect.unwrap(value).__code__.co_names
            if {"_cached_module", "plan"} <= set(names) and any(
                name.startswith(_PINNED_WORKSPACE) for name in names
            ):
                return True
    return False


class _PlannerAttribute:
    """`_cached_module` of a wrapper class, with its `plan` checked.

    Every plan goes through this attribute, that of a wrapper made before the check was
    installed and of a function such as `fast_decode_plan` too.
    """

    def __init__(self, check: H2DRaceCheck) -> None:
        self._check = check

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None:
            return self
        try:
            module = vars(wrapper)["_cached_module"]
        except KeyError:
            raise AttributeError("_cached_module") from None
        return None if module is None else _CheckedPlanner(module, self._check)

    def __set__(self, wrapper: Any, module: Any) -> None:
        if isinstance(module, _CheckedPlanner):
            module = module.unchecked
        vars(wrapper)["_cached_module"] = module


class _CheckedPlanner:
    """A module of FlashInfer's whose `plan` is checked; all else is the module's."""

    def __init__(self, module: Any, check: H2DRaceCheck) -> None:
        self.unchecked = module
        self._check = check

    def plan(self, *args: Any) -> Any:
        return self._check.plan(self.unchecked.plan, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unchecked, name)


def _bytes_used(pinned: torch.Tensor) -> int:
    """Offset behind the last byte of `pinned`, (bytes,) uint8, that is not zero."""
    values = pinned.numpy()
    highest = np.maximum.reduceat(values, np.arange(0, len(values), PAGE_BYTES))
    pages = np.flatnonzero(highest)
    if not pages.size:
        return 0
    start = int(pages[-1]) * PAGE_BYTES
    page = values[start : start + PAGE_BYTES]
    return start + int(np.flatnonzero(page)[-1]) + 1
