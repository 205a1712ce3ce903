# SPDX-License-Identifier: Apache-2.0
"""Host time of MLA's context lengths and of the SM90 plan, the GPU idle and busy.

    python benchmarks/mla_plan.py RESULT.json      (/dev/stdout will do)

For each max_num_batched_tokens, with the released code of the vLLM that is imported:

- sparse, dense: four builds in a row with the metadata builder, of as many prefills as
  it can be given (`rows`; one has to exceed the builder's threshold for decodes), all
  with a context. One build copies the context lengths once;
- plan: one plan of FLASHINFER_MLA_SPARSE_SM90 for 256 rows. It copies three tensors of
  max_num_batched_tokens. vLLM has it from 0.30.0 on.

A row of the result holds host times in ms, medians of 15: idle_ms, the GPU having
nothing to do; busy_ms, behind a kernel of kernel_ms; and waited, whether that kernel
had ended when the host was through. The two take turns, without Python's garbage
collection. busy_ms - idle_ms is how long the host is blocked.

Needs an NVIDIA GPU, pytest (it drives vLLM as the regressions do), and what vLLM
imports; the plan, compute capability 9.x and nvcc.
"""

import gc
import importlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import cycles_per_ms, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/v1/attention"))

SM90 = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90"
TOKENS = tuple(1 << power for power in range(11, 17))
ROUNDS = 15
KERNEL = 50.0  # ms, at least; three times the idle time if that is more
BUILDS = 4
PLANNED = 256


def host_ms(work: Callable[[], object], cycles: int = 0) -> tuple[float, bool]:
    """Host time behind a kernel of `cycles`, and whether that has ended since."""
    kernel = torch.cuda.Event()
    torch.cuda.synchronize()
    if cycles:
        torch.cuda._sleep(cycles)
    kernel.record()
    start = time.perf_counter()
    work()
    elapsed = time.perf_counter() - start
    waited = kernel.query()
    torch.cuda.synchronize()
    return elapsed * 1000, waited


def measure(work: Callable[[], object], per_ms: float) -> dict[str, Any]:
    """Measure idle and busy in turn, after rehearsals, which fill the allocators."""
    host_ms(work)
    kernel = max(KERNEL, 3 * host_ms(work)[0])
    idle, busy = [], []
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS + 1):
        idle.append(host_ms(work)[0])
        busy.append(host_ms(work, int(kernel * per_ms)))
    gc.enable()
    return {
        "idle_ms": statistics.median(idle[1:]),
        "busy_ms": statistics.median(elapsed for elapsed, _ in busy[1:]),
        "kernel_ms": kernel,
        "waited": any(waited for _, waited in busy[1:]),
    }


def make_build(
    regression: Any, kind: str, tokens: int, device: str = "cuda"
) -> tuple[int, Callable[[], object]]:
    """The number of prefills, and four builds of them."""
    make_builder, _ = regression.BUILDERS[kind]
    with tempfile.TemporaryDirectory() as folder:
        config = regression.make_config(
            Path(folder), device, regression.Ranks(), tokens, tokens
        )
    spec = regression.MLAAttentionSpec(
        block_size=regression.BLOCK_SIZE,
        num_kv_heads=1,
        head_size=config.model_config.get_head_size(),
        dtype=config.model_config.dtype,
    )
    where = torch.device(device)
    with regression.set_current_vllm_config(config):
        layers = config.compilation_config.static_forward_context
        layers["layer"] = regression.Layer(config, where)
        builder = make_builder(spec, ["layer"], config, where)
    query = builder.reorder_batch_threshold + 1
    rows = tokens // query
    batch = regression.Batch(0, [(1 + row % 2, query) for row in range(rows)])
    metadata = regression.make_metadata(batch, device, torch.int32)
    return rows, lambda: [builder.build(0, metadata) for _ in range(BUILDS)]


def make_plan(regression: Any, tokens: int) -> tuple[int, Callable[[], object]]:
    """The number of rows, and one plan of them."""
    state = regression.make_state(regression.CUDA, max_tokens=tokens)
    (lengths,) = regression.make_plans([PLANNED])
    return PLANNED, lambda: regression.plan(state, lengths)


def main() -> None:
    path = Path(sys.argv[1])
    # The regressions ask for the strict sync check, which would be measured too: vLLM
    # reads whether it is wanted when this is imported, before them.
    importlib.import_module("vllm.utils.gpu_sync_debug")
    lengths = importlib.import_module("test_mla_context_lens")
    makers = {
        kind: lambda tokens, kind=kind: make_build(lengths, kind, tokens)
        for kind in lengths.BUILDERS
    }
    if importlib.util.find_spec(SM90):
        planning = importlib.import_module("test_flashinfer_mla_sparse_sm90_plan")
        makers["plan"] = lambda tokens: make_plan(planning, tokens)
    result: dict[str, Any] = {"rows": []}
    write(path, result)
    per_ms = cycles_per_ms()
    for kind, make in makers.items():
        for tokens in TOKENS:
            rows, work = make(tokens)
            row = {"kind": kind, "tokens": tokens, "rows": rows}
            result["rows"].append(row | measure(work, per_ms))
            write(path, result)


if __name__ == "__main__":
    main()
