# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which page-locked workspace the plan guard hands to a plan, and what it waits for.

The wrappers here plan nothing: plan() writes to the workspace and copies it, which is
all that vllm/utils/flashinfer_plan_guard.py knows of a FlashInfer wrapper. The stream
is the GPU's, and a queue in its place where there is no GPU.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

guard_module = pytest.importorskip("vllm.utils.flashinfer_plan_guard")

SIZE = 4096  # bytes of a workspace
WRITTEN = 8  # bytes of it that a plan writes
# Clock cycles of a long kernel, about a second. They go by while other processes have
# the GPU.
DELAY = 2_000_000_000
WORKSPACES = guard_module.MAX_SPARES + 1

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)


class Queue:
    """Stands for a CUDA stream: runs what was queued, in order, when it is waited for.

    Kernels take until then.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.done = 0

    def put(self, work: Callable[[], object]) -> int:
        self.waiting.append(work)
        return self.done + len(self.waiting)

    def run(self, until: int) -> None:
        while self.done < until:
            self.waiting.pop(0)()
            self.done += 1


class QueuedEvent:
    """Stands for a CUDA event."""

    def __init__(self, lane: "Lane") -> None:
        self.lane = lane
        self.queue = lane.queue
        self.place = 0

    def record(self, stream: Queue | None = None) -> None:
        assert not self.lane.capturing
        self.queue = stream or self.queue
        self.place = self.queue.put(lambda: None)

    def query(self) -> bool:
        assert not self.lane.capturing
        return self.place <= self.queue.done

    def synchronize(self) -> None:
        self.queue.run(self.place)


class Lane:
    """The GPU's stream, or a queue."""

    def __init__(self, queue: Queue | None) -> None:
        self.queue = self.default = queue
        self.capturing = False
        self.device = torch.device("cuda", 0 if queue is None else 1)
        # On the GPU from the beginning: allocating memory may wait for a kernel.
        where = "cuda" if queue is None else "cpu"
        self.arrivals = list(torch.full((64, SIZE), 77, dtype=torch.uint8).to(where))
        if queue is None:
            torch.cuda.Stream()  # The first of a process may wait for a kernel, too.

    # What the guard asks of CUDA, and what takes its place without a GPU.

    def is_capturing(self) -> bool:
        return self.capturing

    def raw_stream(self, index: int) -> int:
        assert index == self.device.index
        return 0 if self.queue is self.default else id(self.queue)

    def current_stream(self, index: int) -> Queue:
        assert index == self.device.index
        return self.queue

    def sleep(self, seconds: float) -> None:
        self.queue.run(self.queue.done + 1)

    # What the tests do.

    def kernel(self) -> Any:
        """Queue a long kernel; the event after it."""
        if self.queue is None:
            torch.cuda._sleep(DELAY)
        return self.mark()

    def mark(self) -> Any:
        event = torch.Event("cuda")
        event.record()
        return event

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        """Another stream is the current one inside. It ends with what was queued."""
        if self.queue is None:
            with torch.cuda.stream(torch.cuda.Stream()):
                yield
                self.mark().synchronize()
            return
        self.queue = Queue()
        yield
        self.finish()
        self.queue = self.default

    @contextmanager
    def capture(self) -> Iterator[Callable[[], object]]:
        """Capture what is queued inside in a CUDA graph; how to replay it."""
        if self.queue is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                yield graph.replay
            return
        captured = self.queue = Queue()
        self.capturing = True
        yield lambda: [self.default.put(work) for work in captured.waiting]
        self.capturing = False
        self.queue = self.default

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Copy to the GPU asynchronously; what arrives there."""
        target = self.arrivals.pop()
        if self.queue is None:
            return target.copy_(source, non_blocking=True)
        kept = weakref.ref(source)  # as the GPU, which keeps nothing

        def run() -> None:
            alive = kept()
            assert alive is not None, "memory that a copy reads was freed"
            target.copy_(alive)

        self.queue.put(run)
        return target

    def finish(self) -> None:
        if self.queue is None:
            torch.cuda.synchronize()
        else:
            self.queue.run(self.queue.done + len(self.queue.waiting))


class WithoutPinning(TorchFunctionMode):
    """Makes each call without its pinning, which takes CUDA."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return func(*args, **kwargs)


@pytest.fixture(params=["queue", GPU])
def lane(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lane]:
    on_gpu = request.param == "cuda"
    lane = Lane(None if on_gpu else Queue())
    if not on_gpu:
        monkeypatch.setattr(torch, "Event", lambda device: QueuedEvent(lane))
        monkeypatch.setattr(guard_module, "_is_capturing", lane.is_capturing)
        monkeypatch.setattr(guard_module, "_current_raw_stream", lane.raw_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lane.current_stream)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lane.is_capturing
        )
        monkeypatch.setattr(guard_module.time, "sleep", lane.sleep)
    with nullcontext() if on_gpu else WithoutPinning():
        yield lane
        gc.collect()


@pytest.fixture
def guard(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The guard's module, without any spare workspace."""
    monkeypatch.setattr(guard_module, "_spares", {})
    return guard_module


class Wrapper:
    """All that the guard knows of a wrapper of FlashInfer's."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.device = lane.device
        self.reset_workspace_buffer()

    def reset_workspace_buffer(self) -> None:
        self._pin_memory_int_workspace_buffer = torch.zeros(
            SIZE, dtype=torch.uint8, pin_memory=True
        )

    def plan(self, value: int) -> torch.Tensor:
        workspace = self._pin_memory_int_workspace_buffer
        workspace[:WRITTEN] = value
        return self.lane.copy(workspace)


Wrapper.__module__ = "flashinfer.decode"


class Plans:
    """Guarded plans of one wrapper, each of a value of its own."""

    def __init__(self, lane: Lane, wrapper: Wrapper | None = None) -> None:
        self.wrapper = wrapper or Wrapper(lane)
        self.made: list[tuple[int, torch.Tensor]] = []

    def plan(self, count: int = 1) -> torch.Tensor:
        """Make as many plans; what arrives of the last."""
        for _ in range(count):
            value = len(self.made) + 1
            with guard_module.plan_guard(self.wrapper):
                self.made.append((value, self.wrapper.plan(value)))
        return self.made[-1][1]

    def check(self) -> None:
        found = [arrived[:WRITTEN].tolist() for _, arrived in self.made]
        assert found == [[value] * WRITTEN for value, _ in self.made]


def spares(guard: ModuleType) -> int:
    return sum(pool.allocated for pool in guard._spares.values())


def rehearse(lane: Lane, plans: Plans) -> None:
    """Allocate every spare workspace, which may wait for a kernel."""
    lane.kernel()
    plans.plan(WORKSPACES)
    lane.finish()


def test_own_workspace_while_the_gpu_keeps_up(lane: Lane, guard: ModuleType) -> None:
    plans = Plans(lane)
    own = plans.wrapper._pin_memory_int_workspace_buffer
    for _ in range(5):
        plans.plan()
        assert plans.wrapper._pin_memory_int_workspace_buffer is own
        lane.finish()
    plans.check()
    assert spares(guard) == 0


def test_no_wait_for_as_many_plans_as_workspaces(lane: Lane, guard: ModuleType) -> None:
    plans = Plans(lane)
    rehearse(lane, plans)
    kernel = lane.kernel()
    plans.plan(WORKSPACES)
    assert not kernel.query(), "a plan waited for the long kernel"
    plans.plan()
    assert kernel.query(), "the last plan has rewritten one in flight"
    lane.finish()
    plans.check()
    assert spares(guard) == guard.MAX_SPARES


def test_waits_for_the_oldest_plan_only(lane: Lane, guard: ModuleType) -> None:
    """Not for the wrapper's own workspace, where that has been planned into later."""
    plans = Plans(lane)
    rehearse(lane, plans)
    lane.kernel()
    plans.plan()
    first = lane.mark()
    oldest = lane.kernel()
    plans.plan(guard.MAX_SPARES - 1)
    first.synchronize()
    newest = lane.kernel()
    plans.plan(2)  # into the wrapper's own workspace, and into the last spare
    assert not oldest.query(), "a plan waited where workspaces were free"
    plans.plan()
    assert oldest.query(), "a plan in flight has been rewritten"
    assert not newest.query(), "a plan waited for one that was not the oldest"
    lane.finish()
    plans.check()


def test_waits_for_the_plan_that_is_over_first(lane: Lane, guard: ModuleType) -> None:
    """It may be in the own workspace, or on another stream than the oldest."""
    plans, other = Plans(lane), Plans(lane)
    rehearse(lane, plans)
    lane.kernel()
    plans.plan()
    newest = lane.kernel()
    plans.plan(guard.MAX_SPARES)
    plans.plan()
    assert not newest.query(), "a plan waited for one in a spare, its own being free"
    with lane.other_stream():
        other.plan(3)
    assert not newest.query(), "a plan waited for one on another stream"
    lane.finish()
    plans.check()
    other.check()


def test_events_are_on_the_streams_of_the_plans(lane: Lane, guard: ModuleType) -> None:
    """Each on its own plan's stream, not on that of the first plan, or of the last."""
    plans = Plans(lane)
    rehearse(lane, plans)
    with lane.other_stream():
        plans.plan()
    kernel = lane.kernel()
    plans.plan(2)
    for _ in range(WORKSPACES):
        with lane.other_stream():
            plans.plan()
    assert not kernel.query(), "a plan waited for one on another stream"
    plans.plan(2)
    lane.finish()
    plans.check()


def test_many_wrappers_share_the_spares(lane: Lane, guard: ModuleType) -> None:
    each = [Plans(lane) for _ in range(guard.MAX_SPARES)]
    lane.kernel()
    for _ in range(3):
        for plans in each:
            plans.plan()
    lane.finish()
    for plans in each:
        plans.check()
    assert spares(guard) == guard.MAX_SPARES


def test_waits_where_no_memory_can_be_pinned(
    lane: Lane, guard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare that cannot be allocated is done without, and not tried for again."""
    tried = []

    def refuse(buffer: torch.Tensor) -> torch.Tensor:
        tried.append(buffer)
        raise RuntimeError("CUDA error: out of memory")

    said: list[str] = []
    monkeypatch.setattr(guard, "_pinned_like", refuse)
    monkeypatch.setattr(guard.logger, "warning", lambda *args: said.append(args[0]))
    plans = Plans(lane)
    kernel = lane.kernel()
    plans.plan()
    assert not kernel.query(), "the first plan waited for the long kernel"
    plans.plan()
    assert kernel.query(), "the second plan has rewritten the first"
    lane.kernel()
    plans.plan(2)
    lane.finish()
    plans.check()
    assert len(tried) == 1 and len(said) == 1


def test_spares_of_plans_in_inference_mode(lane: Lane, guard: ModuleType) -> None:
    """A spare that was allocated in inference mode can be cleared outside of it."""
    one, other = Plans(lane), Plans(lane)
    with torch.inference_mode():
        lane.kernel()
        one.plan(2)
    lane.finish()
    lane.kernel()
    other.plan(2)
    lane.finish()
    with torch.inference_mode():
        lane.kernel()
        one.plan(2)
    lane.finish()
    one.check()
    other.check()
    assert spares(guard) == 1


def test_nothing_of_another_wrapper_is_left_in_a_spare(
    lane: Lane, guard: ModuleType
) -> None:
    """What a plan does not write is zero, or what the wrapper itself had there."""
    one, other = Plans(lane), Plans(lane)
    lane.kernel()
    one.plan()
    with guard.plan_guard(one.wrapper):
        spare = one.wrapper._pin_memory_int_workspace_buffer
        spare.fill_(9)
    lane.finish()
    lane.kernel()
    one.plan()
    mine = one.plan()
    lane.finish()
    lane.kernel()
    other.plan()
    others = other.plan()
    lane.finish()
    assert spares(guard) == 1
    assert mine[WRITTEN:].eq(9).all()
    assert others[WRITTEN:].eq(0).all()


def test_a_wrapper_gets_its_last_spare_again(lane: Lane, guard: ModuleType) -> None:
    one, other = Plans(lane), Plans(lane)
    lane.kernel()
    for plans in (other, one):
        plans.plan(2)
    lane.finish()
    assert spares(guard) == 2
    used = []
    for plans in (one, other, other, one):
        lane.kernel()
        plans.plan()
        with guard.plan_guard(plans.wrapper):
            used.append(plans.wrapper._pin_memory_int_workspace_buffer.data_ptr())
        lane.finish()
    assert used[0] == used[3] and used[1] == used[2] and used[0] != used[1]


def test_workspaces_that_were_reset_are_let_go(lane: Lane, guard: ModuleType) -> None:
    """Once their copies have run, and not before."""
    plans = Plans(lane)
    plans.plan()
    lane.finish()
    dropped = []
    for _ in range(10):
        dropped.append(weakref.ref(plans.wrapper._pin_memory_int_workspace_buffer))
        plans.wrapper.reset_workspace_buffer()
        plans.plan()
        lane.finish()
    assert sum(workspace() is not None for workspace in dropped) <= 1
    kernel = lane.kernel()
    plans.plan()
    in_flight = weakref.ref(plans.wrapper._pin_memory_int_workspace_buffer)
    plans.wrapper.reset_workspace_buffer()
    plans.plan()
    assert in_flight() is not None and not kernel.query()
    lane.finish()
    plans.check()


def test_the_guard_keeps_no_wrapper(lane: Lane, guard: ModuleType) -> None:
    """Nor the workspace, once another wrapper needs a spare."""
    plans, other = Plans(lane), Plans(lane)
    other.plan()
    lane.finish()
    lane.kernel()
    plans.plan(3)
    wrapper = weakref.ref(plans.wrapper)
    workspace = weakref.ref(plans.wrapper._pin_memory_int_workspace_buffer)
    made = plans.made
    del plans
    gc.collect()
    assert wrapper() is None, "the guard keeps the wrapper"
    assert workspace() is not None, "memory that a copy reads was freed"
    lane.finish()
    assert [arrived[0].item() for _, arrived in made] == [1, 2, 3]
    lane.kernel()
    other.plan(2)
    lane.finish()
    gc.collect()
    assert workspace() is None, "the guard keeps the workspace"


def test_a_captured_plan_keeps_its_workspace(lane: Lane, guard: ModuleType) -> None:
    """Its graph copies from there at each replay, whatever was planned in between."""
    plans = Plans(lane)
    with lane.capture() as replay:
        plans.plan()
    for _ in range(2):
        lane.kernel()
        plans.plan(3)
        replay()
        lane.finish()
        plans.check()
    assert spares(guard) == 2


def test_subclasses_are_guarded(lane: Lane, guard: ModuleType) -> None:
    """Also where their module is not FlashInfer's."""

    class Subclass(Wrapper):
        pass

    assert not Subclass.__module__.startswith("flashinfer")
    plans = Plans(lane, Subclass(lane))
    lane.kernel()
    plans.plan(4)
    lane.finish()
    plans.check()
    assert spares(guard) == 3


def test_a_workspace_is_put_back_when_a_plan_raises(
    lane: Lane, guard: ModuleType
) -> None:
    plans = Plans(lane)
    own = plans.wrapper._pin_memory_int_workspace_buffer
    lane.kernel()
    plans.plan(2)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), guard.plan_guard(plans.wrapper):
            raise ZeroDivisionError
        assert plans.wrapper._pin_memory_int_workspace_buffer is own
    plans.plan(2)
    lane.finish()
    plans.check()


def test_a_wrapper_can_plan_again_when_the_guard_raised(
    lane: Lane, guard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = Plans(lane)
    lane.kernel()
    plans.plan()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(guard._Spares, "take", lambda *_: 1 // 0)
        plans.plan()
    lane.finish()
    again = threading.Thread(target=plans.plan, daemon=True)
    again.start()
    again.join(20)
    assert not again.is_alive(), "the next plan waits for ever"
    lane.finish()
    plans.check()
