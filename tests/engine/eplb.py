# SPDX-License-Identifier: Apache-2.0
"""Ranks of one engine that share a GPU, and a check of the experts that EPLB moves.

NCCL refuses two ranks on one GPU. Here vLLM is launched externally, a process a rank,
and every group is Gloo's, which takes GPU tensors and stages them in host memory.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

GRACE = 10  # seconds that the other ranks have to end when one has failed
ENOUGH = 3  # rebalances that have to move experts

# The two places where EPLB makes a new placement the current one, after it has moved
# the weights: of all layers, and of one layer where it moves them in the background.
COMMITS = ("_commit_eplb_maps", "_commit_eplb_maps_for_layer")

# What a rank needs besides its options. Gloo does the rest where all of these are off.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_DISABLE_PYNCCL": "1",
}


def start_ranks(count: int, script: list[str], result: Path, last: list[str]) -> None:
    """Run a process for each rank until all have ended, or one has failed.

    Each gets the arguments `script`, a file for its result, `last`, and its rank. What
    they come to is written to `result`.
    """
    # Rank 0 writes there itself, so that a caller who ends us sees how far it was.
    files = [result if not n else Path(f"{result}.{n}") for n in range(count)]
    ranks = [
        subprocess.Popen([sys.executable, *script, str(file), *last, str(n)])
        for n, file in enumerate(files)
    ]

    def failed(rank: int) -> bool:
        return ranks[rank].poll() is not None and "outputs" not in _read(files[rank])

    while any(process.poll() is None for process in ranks):
        if any(failed(rank) for rank in range(count)):
            break
        time.sleep(0.1)
    killed = _end(ranks)
    codes = [None if process in killed else process.returncode for process in ranks]
    result.write_text(json.dumps(combine([_read(file) for file in files], codes)))


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _end(ranks: list[subprocess.Popen]) -> list[subprocess.Popen]:
    """Wait for the ranks to end, not long; those that had to be killed."""
    killed = []
    until = time.monotonic() + GRACE
    for process in ranks:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed.append(process)
    return killed


def combine(results: list[dict[str, Any]], codes: list[int | None]) -> dict[str, Any]:
    """Rank 0's result, with what failed first on any rank, and the races of all.

    A rank without outputs and error counts as the first, unless its exit code is None:
    such a one was killed for another's sake.
    """
    errors = []
    for rank, (result, code) in enumerate(zip(results, codes, strict=True)):
        if "error" in result:
            errors.append(result["error"])
        elif "outputs" not in result and code is not None:
            phase = "generate" if result else "start"
            message = f"rank {rank} ended with {code}"
            errors.append({"phase": phase, "message": message, "at": 0.0})
    made = dict(results[0])
    if any("races" in result for result in results):
        races: Counter[str] = Counter()
        for result in results:
            races.update(result.get("races", {}))
        made["races"] = dict(races)
    if errors:
        made.pop("outputs", None)
        made["error"] = min(errors, key=lambda error: error["at"])
    return made


def join(rank: int, count: int, store: Path) -> None:
    """Make this process a rank, before its engine starts; `store` is a file of all."""
    import torch

    from vllm.platforms import current_platform

    # Where an external launcher tells vLLM. Both ranks have the first GPU.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(count)}
    current_platform.dist_backend = "gloo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count
    )


def meet() -> None:
    """Wait for all ranks: one that ends early ends the others' connections."""
    import torch

    torch.distributed.barrier()


def arrivals(before: list[int], after: list[int], ranks: int) -> int:
    """How many slots of a layer got an expert that their rank did not have.

    A placement lists the logical expert of each slot, rank by rank.
    """
    slots = len(after) // ranks
    starts = range(0, len(after), slots)
    return sum(
        expert not in before[start : start + slots]
        for start in starts
        for expert in after[start : start + slots]
    )


def raw(weight: Any) -> list[bytes]:
    """The bytes of each slot of an expert weight."""
    import torch

    return [slot.tobytes() for slot in weight.detach().cpu().view(torch.uint8).numpy()]


class Rebalances:
    """Compares the weights of all slots with their experts' after each rebalance.

    Attributes:
        moved: Of each rebalance, how many slots of any rank got an expert that the rank
            did not have.

    """

    def __init__(self) -> None:
        self.moved: list[int] = []
        self._rank = 0
        self._ranks = 1
        # By MoE layer: the logical expert of each slot, and each expert's weights.
        self._placements: list[list[int]] = []
        self._experts: list[dict[int, list[bytes]]] = []

    def watch(self) -> None:
        """Have vLLM's EPLB checked; before the engine starts."""
        from vllm.distributed.eplb import eplb_state

        add_model = eplb_state.EplbState.add_model

        @functools.wraps(add_model)
        def add_and_record(eplb: Any, *arguments: Any, **options: Any) -> None:
            add_model(eplb, *arguments, **options)
            (state,) = eplb.model_states.values()
            self.record(state)

        eplb_state.EplbState.add_model = add_and_record
        for name in COMMITS:
            setattr(eplb_state, name, self._checked(getattr(eplb_state, name)))

    def record(self, state: Any) -> None:
        """Keep what each expert holds on any rank, before anything has moved.

        Raises RuntimeError where two slots of an expert, or no two experts, differ:
        nothing could be told from them.
        """
        import torch

        from vllm.distributed.parallel_state import get_eplb_group

        group = get_eplb_group()
        self._rank, self._ranks = group.rank_in_group, group.world_size
        local = [[raw(each) for each in layer] for layer in state.model.expert_weights]
        shared: list[Any] = [None] * self._ranks
        torch.distributed.all_gather_object(shared, local, group=group.cpu_group)
        self._placements = state.physical_to_logical_map.tolist()
        for layer, placement in enumerate(self._placements):
            experts: dict[int, list[bytes]] = {}
            for place, expert in enumerate(placement):
                rank, slot = divmod(place, len(placement) // self._ranks)
                weights = [weight[slot] for weight in shared[rank][layer]]
                if experts.setdefault(expert, weights) != weights:
                    raise RuntimeError(
                        f"the slots of expert {expert} of layer {layer} differ"
                    )
            if len(set(map(tuple, experts.values()))) < len(experts):
                raise RuntimeError(f"two experts of layer {layer} are the same")
            self._experts.append(experts)

    def _checked(self, commit: Callable[..., None]) -> Callable[..., None]:
        """`commit`, followed by the check of the layers that it is about."""
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed

        @functools.wraps(commit)
        def commit_and_check(state: Any, *arguments: Any, **options: Any) -> None:
            commit(state, *arguments, **options)
            layers = [options["layer"]] if "layer" in options else self._all_layers()
            with gpu_sync_allowed():  # the check's own copies to the host
                for layer in layers:
                    self.check(state, layer)

        return commit_and_check

    def _all_layers(self) -> range:
        return range(len(self._placements))

    def check(self, state: Any, layer: int) -> None:
        """Count what a rebalance moved in a layer; RuntimeError where it is wrong."""
        before = self._placements[layer]
        after = state.physical_to_logical_map[layer].tolist()
        if layer == 0 or not self.moved:
            self.moved.append(0)
        self.moved[-1] += arrivals(before, after, self._ranks)
        self._placements[layer] = after
        slots = len(after) // self._ranks
        local = after[self._rank * slots :][:slots]
        for index, weight in enumerate(state.model.expert_weights[layer]):
            for slot, (expert, held) in enumerate(zip(local, raw(weight), strict=True)):
                right = self._experts[layer][expert][index]
                if held != right:
                    where = f"rank {self._rank}, MoE layer {layer}, slot {slot}"
                    what = difference(held, right, weight.element_size())
                    raise RuntimeError(
                        f"{where}: weight {index} of logical expert {expert} is wrong"
                        f" after rebalance {len(self.moved)}, {what}"
                    )

    def demand(self) -> None:
        """RuntimeError unless there was something to check."""
        moving = sum(map(bool, self.moved))
        if moving < ENOUGH:
            raise RuntimeError(
                f"of {len(self.moved)} rebalances {moving} moved an expert to another"
                f" rank; {ENOUGH} have to"
            )


def difference(held: bytes, right: bytes, size: int) -> str:
    """The first element that differs, of `size` bytes."""
    elements = zip(_split(held, size), _split(right, size), strict=True)
    return next(
        f"first at element {number}: bytes {one.hex()} instead of {other.hex()}"
        for number, (one, other) in enumerate(elements)
        if one != other
    )


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
