# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep FlashInfer's plan() from rewriting page-locked memory in flight.

A FlashInfer wrapper fills one page-locked workspace in plan() and copies it to the
GPU asynchronously. Its next plan() fills the same workspace, whether or not that copy
has run: with the GPU a step behind, attention runs on the schedule of another batch.

`with plan_guard(wrapper):` around a plan gives it a workspace that no copy still has
to read: the wrapper's own, or else a spare one. The host waits only when its last plan
and those in all the spares are in flight, and until the first of them is not.
"""

import contextlib
import functools
import inspect
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

# The page-locked workspace of a wrapper: uint8, 8 MB unless it was given another.
# plan() and fast_decode_plan() hand it to the C++ planner at each call.
WORKSPACE = "_pin_memory_int_workspace_buffer"

# Spare workspaces of a device and size, shared by its wrappers: 16 plans in flight with
# the wrapper's own. Each is allocated when it is first needed and kept, 120 MB together
# at most. A captured plan has one more, for as long as its wrapper.
MAX_SPARES = 15

# Seconds between two looks for a free workspace, where all are in flight. Which of them
# is free first is not known: the plans may be on several streams.
POLL = 1e-5

# What vLLM plans with, and must plan through WORKSPACE for the guard to hold.
_PLANNERS = {
    "flashinfer.decode": ("BatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan"),
    "flashinfer.prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ),
}

# Without CUDA, torch has neither, and there is nothing to guard.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_Guard = contextlib.AbstractContextManager[None]


def plan_guard(wrapper: Any) -> _Guard:
    """Guard one plan of `wrapper`, made inside the `with` block.

    Plans of one wrapper may come from several threads and streams; each has to be on
    the current stream. They do not nest. A plan captured in a CUDA graph keeps its
    workspace for as long as the wrapper lives.

    Args:
        wrapper: A FlashInfer wrapper. It is left alone if it is not FlashInfer's, or
            if its FlashInfer stages the plan in memory of the call's own.

    Raises:
        RuntimeError: This FlashInfer plans in a way that the guard does not know.

    """
    guard = getattr(wrapper, "_vllm_plan_guard", None)
    return _first_guard(wrapper) if guard is None else guard


class _Workspace:
    """A page-locked workspace, and the event after the last copy from it."""

    __slots__ = ("buffer", "copied")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        # Recorded in half the time that a torch.cuda.Event takes.
        self.copied = torch.Event("cuda")


def _pinned_like(buffer: torch.Tensor) -> torch.Tensor:
    """Page-locked zeros, which can be written to in and outside inference mode."""
    with torch.inference_mode(False):
        return torch.zeros_like(buffer, pin_memory=True)


class _Spares:
    """The spare workspaces of one device and size, used in turn."""

    def __init__(self) -> None:
        # Workspaces of wrappers that are gone, until no copy has to read them.
        self.retired: deque[_Workspace] = deque()
        self.allocated = 0
        self._limit = MAX_SPARES
        self._lock = threading.Lock()
        # Not being planned into, in the order of their last plans, with who made them.
        self._idle: list[tuple[_Workspace, weakref.ref[_PlanGuard]]] = []

    def take(self, guard: "_PlanGuard") -> _Workspace | None:
        """A workspace that no copy has to read, None if there is none."""
        if self.retired:
            self.release_retired()
        with self._lock:
            entry = self._find(guard)
            if entry is None and self.allocated < self._limit:
                try:
                    buffer = _pinned_like(guard.own.buffer)
                except RuntimeError as error:
                    self._limit = self.allocated
                    logger.warning("Plans may wait: no pinned memory (%s)", error)
                else:
                    self.allocated += 1
                    return _Workspace(buffer)
            if entry is None:
                return None
            self._idle.remove(entry)
        workspace, last_user = entry
        if last_user() is not guard:
            # A plan leaves gaps. Kernels cope with old indices of their own wrapper in
            # them; those of another one may be out of range.
            workspace.buffer.zero_()
        return workspace

    def _find(
        self, guard: "_PlanGuard"
    ) -> "tuple[_Workspace, weakref.ref[_PlanGuard]] | None":
        """One whose copy has run, if possible one that the guard has used last."""
        free = None
        for entry in self._idle:
            own = entry[1]() is guard
            if (own or free is None) and entry[0].copied.query():
                if own:
                    return entry
                free = entry
        return free

    def give_back(self, spare: _Workspace, guard: "_PlanGuard") -> None:
        with self._lock:
            self._idle.append((spare, weakref.ref(guard)))

    def release_retired(self) -> None:
        """Let go of those that no copy has to read; not while capturing."""
        with self._lock:
            for _ in range(len(self.retired)):
                workspace = self.retired.popleft()
                if not workspace.copied.query():
                    self.retired.append(workspace)


_spares: dict[tuple[torch.device, int], _Spares] = {}
_first_guard_lock = threading.Lock()


class _PlanGuard:
    """The guard of one wrapper, entered around each of its plans.

    A plan fills the processor's caches, and every object that is looked at around it
    costs: so there are few.
    """

    __slots__ = (
        *("own", "_captured", "_current", "_device_index", "_lock", "_spares"),
        *("_raw_stream", "_stream", "_wrapper", "__weakref__"),
    )

    def __init__(self, wrapper: Any, buffer: torch.Tensor) -> None:
        self._own(wrapper.device, buffer)
        self._wrapper = weakref.ref(wrapper)
        # plan() takes the workspace from an attribute, so one plan at a time.
        self._lock = threading.Lock()
        self._current: _Workspace | None = None
        # A CUDA graph reads these again at each replay.
        self._captured: list[torch.Tensor] = []
        # Of the last plan. torch.cuda.current_stream() takes 3 us to make an object.
        self._raw_stream = -1
        self._stream: torch.cuda.Stream | None = None

    def _own(self, device: torch.device, buffer: torch.Tensor) -> None:
        """Take `buffer` as the wrapper's own workspace."""
        self._device_index = device.index
        self._spares = _spares.setdefault((device, buffer.nbytes), _Spares())
        self.own = _Workspace(buffer)

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            wrapper = self._wrapper()
            buffer = getattr(wrapper, WORKSPACE)
            raw_stream = _current_raw_stream(self._device_index)
            if raw_stream != self._raw_stream:
                self._stream = torch.cuda.current_stream(self._device_index)
                self._raw_stream = raw_stream
            # CUDA captures no graph on the default stream, which is 0.
            capturing = raw_stream != 0 and _is_capturing()
            if capturing or buffer is not self.own.buffer:
                self._current = self._renew(wrapper, buffer, capturing)
            elif self.own.copied.query():
                self._current = self.own
            else:
                self._current = self._spare(wrapper)
        except BaseException:
            self._lock.release()
            raise

    def _spare(self, wrapper: Any) -> _Workspace:
        """A workspace while the last plan is in flight: the first that is free."""
        while (spare := self._spares.take(self)) is None:
            if self.own.copied.query():
                return self.own
            time.sleep(POLL)
        setattr(wrapper, WORKSPACE, spare.buffer)
        return spare

    def _renew(
        self, wrapper: Any, buffer: torch.Tensor, capturing: bool
    ) -> _Workspace | None:
        """The workspace that the wrapper was given, or None, with one for the graph."""
        if buffer is not self.own.buffer:  # reset_workspace_buffer() was called
            self._spares.retired.append(self.own)
            if not capturing:
                self._spares.release_retired()
            self._own(wrapper.device, buffer)
        if not capturing:
            return self.own
        # Events must be neither queried nor recorded here.
        self._captured.append(_pinned_like(buffer))
        setattr(wrapper, WORKSPACE, self._captured[-1])
        return None

    def __exit__(self, *_: object) -> None:
        # A plan that raised may have queued its copy before.
        workspace, self._current = self._current, None
        try:
            if workspace is not self.own:
                setattr(self._wrapper(), WORKSPACE, self.own.buffer)
            if workspace is not None:
                workspace.copied.record(self._stream)
                if workspace is not self.own:
                    self._spares.give_back(workspace, self)
        finally:
            self._lock.release()

    def __del__(self) -> None:
        self._spares.retired.append(self.own)


def _first_guard(wrapper: Any) -> _Guard:
    """The guard of a wrapper that has none yet."""
    if not _needs_guard(type(wrapper)):
        return contextlib.nullcontext()
    if hasattr(wrapper, "_batch_prefill_wrappers"):
        return _guard_levels(wrapper)
    with _first_guard_lock:
        if not hasattr(wrapper, "_vllm_plan_guard"):
            buffer = getattr(wrapper, WORKSPACE, None)
            if buffer is None:
                raise _unknown(type(wrapper))
            guard = _PlanGuard(wrapper, buffer)
            if not torch.cuda.is_current_stream_capturing():
                guard._spares.release_retired()
            wrapper._vllm_plan_guard = guard
    return wrapper._vllm_plan_guard


@contextlib.contextmanager
def _guard_levels(wrapper: Any) -> Iterator[None]:
    """Guard the wrappers of a MultiLevelCascadeAttentionWrapper."""
    with contextlib.ExitStack() as stack:
        for level in wrapper._batch_prefill_wrappers:
            stack.enter_context(plan_guard(level))
        yield


@functools.cache
def _needs_guard(cls: type) -> bool:
    """Whether wrappers of `cls` plan through a workspace that they reuse."""
    names = {
        base.__name__
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == "flashinfer"
    }
    if not names:
        logger.debug("%s is not FlashInfer's: its plans need no guard", cls)
        return False
    if "MultiLevelCascadeAttentionWrapper" in names or _plans_through(cls):
        return True
    if "BatchMLAPagedAttentionWrapper" in names and _mla_stages_plans():
        logger.debug("FlashInfer stages the plans of %s: they need no guard", cls)
        return False
    raise _unknown(cls)


def _plans_through(planner: Any) -> bool:
    """Whether a wrapper class, or a function that plans, reads WORKSPACE."""
    if not isinstance(planner, type):
        return WORKSPACE in inspect.unwrap(planner).__code__.co_names
    return any(
        _plans_through(method)
        for base in planner.__mro__
        for name, method in vars(base).items()
        if inspect.isfunction(method)
        and name not in ("__init__", "reset_workspace_buffer")
    )


def _mla_stages_plans() -> bool:
    """Whether MLA plans are copied from pinned memory of the call's own.

    FlashInfer does so since 0.7.0, in the adapter of its generated MLA modules.
    """
    modules = sys.modules.get("flashinfer.jit.attention.modules")
    return any(
        hasattr(adapter, "plan_with_staged_workspace_bytes")
        for adapter in vars(modules or object).values()
    )


def _unknown(planner: Any) -> RuntimeError:
    return RuntimeError(
        f"FlashInfer's {planner.__name__} does not plan through {WORKSPACE}, so vLLM "
        "cannot keep its plans from being rewritten in flight; install the FlashInfer "
        "that this vLLM requires"
    )


def _check_flashinfer() -> None:
    """Fail at start, not at a plan, where FlashInfer is not as the guard expects."""
    for name, planners in _PLANNERS.items():
        module = sys.modules.get(name)
        for planner in planners if module else ():
            if not _plans_through(found := getattr(module, planner)):
                raise _unknown(found)


_check_flashinfer()
