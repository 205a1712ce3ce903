# SPDX-License-Identifier: Apache-2.0
"""Show that the regressions can fail: unpatched, and under mutations of the cure.

    python tests/controls/run.py UNPATCHED PATCHED [REGRESSION ...]
                                 [--mutations] [--upstream TESTS]

UNPATCHED and PATCHED are folders that hold the `vllm/` of one release, without the
edits and with them. Runs each regression on both and prints a table. A regression
that guards an edit is named `test_pinned_...`: unpatched it must fail with what the
fault does (the sync check's message, a blocked host, wrong values), patched it must
pass; one that passes on both is vacuous. Tests of a module that the edits bring are
skipped unpatched, for want of it. REGRESSION, a part of a file's name, leaves out all
others. Where the two trees have the same file, or none of the edit's lines differ, the
cure came with the release, and its regressions must pass on both.

--mutations also breaks the cure in ways that look like a cure; each must be caught.
--upstream also runs vLLM's own tests of these parts, from the folder `tests` of its
source distribution, and lists where the two trees differ.

Exits with 1 where any of that does not hold. Needs what vLLM imports, and for most
regressions an NVIDIA GPU of compute capability 9.x; without one they are skipped.
"""

import argparse
import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
TIMEOUT = 480  # seconds, for one file of tests: a rank that hangs
JOBS = max(2, (os.cpu_count() or 1) // 4)

EPLB = "vllm/distributed/eplb/eplb_communicator.py"
SPARSE = "vllm/model_executor/layers/attention/sparse_mla_attention.py"
DENSE = "vllm/model_executor/layers/attention/mla_attention.py"
SM90 = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"
FLASH_ATTN = "vllm/v1/attention/backends/flash_attn.py"
MODEL_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
DRAFTER = "vllm/v1/spec_decode/llm_base_proposer.py"
EXTRACT = "vllm/v1/spec_decode/extract_hidden_states.py"
BITMASK = "vllm/v1/worker/gpu/structured_outputs.py"
STEP5 = "vllm/models/step5/nvidia/flashinfer_sparse.py"
STEP5_CHUNKS = "vllm/models/step5/nvidia/ops/sparse_prefill.py"
GPU_WORKER = "vllm/v1/worker/gpu_worker.py"
INPUT_BATCH = "vllm/v1/worker/gpu_input_batch.py"
COMPASS = "vllm/model_executor/models/cohere_compass.py"
DOTS3 = "vllm/models/dots3_note/nvidia/vision.py"
MULTIMODAL = "vllm/multimodal/inputs.py"
ENVS = "vllm/envs.py"
SYNC_CHECK = "vllm/utils/gpu_sync_debug.py"
PLAN_GUARD = "vllm/utils/flashinfer_plan_guard.py"

# The regressions, and the edited files that each guards.
REGRESSIONS = {
    "distributed/test_eplb_gloo_staging.py": (EPLB,),
    "v1/attention/test_mla_context_lens.py": (SPARSE, DENSE),
    "v1/attention/test_flashinfer_mla_sparse_sm90_plan.py": (SM90,),
    "utils/test_plan_workspaces.py": (FLASHINFER,),
    "utils/test_flashinfer_plan_guard.py": (FLASHINFER,),
    "utils/test_h2d_race_check.py": (GPU_WORKER, ENVS),
    "v1/attention/test_flash_attn_mm_prefix_ranges.py": (FLASH_ATTN,),
    "v1/attention/test_flashinfer_paged_kv_buffers.py": (FLASHINFER,),
    "v1/worker/test_pipeline_input_prep.py": (MODEL_RUNNER,),
    "v1/spec_decode/test_backup_next_token_ids.py": (DRAFTER, EXTRACT),
    "v1/worker/test_grammar_bitmask_copy.py": (BITMASK,),
    "v1/worker/test_num_computed_tokens_copy.py": (MODEL_RUNNER,),
    "v1/worker/test_allowed_token_ids_mask.py": (INPUT_BATCH,),
    "v1/attention/test_step5_prefill_plan.py": (STEP5_CHUNKS, STEP5),
    "v1/worker/test_rope_positions_copy.py": (MODEL_RUNNER,),
    "v1/worker/test_pruned_mrope_positions.py": (MODEL_RUNNER,),
    "models/test_cohere_compass_positions.py": (COMPASS,),
    "models/test_dots3_note_vision.py": (DOTS3,),
    "multimodal/test_nested_tensors_copy.py": (MULTIMODAL,),
}
# Tests with such a parameter guard the edit of such lines: others change their file, too.
LINES = {
    "mrope": r"mrope_positions\.gpu\[",
    "xdrope": r"xdrope_positions\.gpu\[",
}
# What a fault does: only such a failure shows that a regression sees it.
FAULT = re.compile("not pinned|from pageable memory|waited for|not their own")
# How a test of a module that the edits bring is skipped without it.
NO_MODULE = re.compile(r"could not import 'vllm\.utils\.")
UPSTREAM = (
    "distributed/test_eplb_execute.py",
    "v1/attention/test_mla_context_chunks.py",
    "v1/attention/test_flashinfer_mla_sparse_sm90.py",
)

SCRATCH = '''


_scratch = {}


def scratch(tensor, *key):
    """Pinned memory that is used again by the next call: kind B."""
    key = (*key, tensor.shape, tensor.dtype)
    if key not in _scratch:
        _scratch[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return _scratch[key]
'''
ALLOWED = '''


def allowed(function):
    """Hide what `function` does from the strict check."""
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    def call(*args, **kwargs):
        with gpu_sync_allowed():
            return function(*args, **kwargs)

    return call
'''
END = r"\Z"
SM90_CALL = r"(?m)^( +)self\.wrapper\.plan\("
SM90_PIN = r"buffer\.pin_memory\(\) if PIN_MEMORY else buffer\n"
EPLB_PINNED = r'torch\.empty_like\(\s*tensor, device="cpu", pin_memory=PIN_MEMORY\s*\)'
EPLB_COPY = r"dst_tensor\.copy_\(cpu_tensor, non_blocking=True\)"
LENS_PINNED = (
    r"torch\.empty\(\s*(num_prefills), (dtype=\S+), pin_memory=PIN_MEMORY\s*\)"
)
LENS_SUBTRACT = (
    r"torch\.subtract\(((?:[^()]|\[[^]]*\])*?),\s*out=context_lens_cpu,\s*\)"
)
RANGES_PINNED = r"torch\.empty_like\(staged, pin_memory=PIN_MEMORY\)\.copy_\(staged\)"
KEYS_PINNED = r"torch\.empty_like\((cu_k\[start : end \+ 1\]), pin_memory=PIN_MEMORY\)"
QUERIES_PINNED = r'(device="cpu",)\s+pin_memory=PIN_MEMORY,'
STEP5_GUARD = r"(?m)^( +)with plan_guard\(self\._attention\):$"
MASK_PINNED = r'(dtype=torch\.bool,\s+device="cpu",)\s+pin_memory=PIN_MEMORY,'
MASK_COPIED = r"copy_slice\(\s*self\.allowed_token_ids_mask_cpu_tensor,[^)]*\)"
ROPE_ROWS = (
    r"for row in range\(self\.(\w+)_positions\.gpu\.shape\[0\]\):\s+"
    r"self\.\1_positions\.gpu\[row, (:\w+)\]\.copy_\([^()]*\)"
)
PRUNED_NEW = r"torch\.zeros_like\(\s*self\.mrope_positions\.cpu, [^)]*\)"
COMPASS_IDS = r"torch\.cat\(pos_ids, dim=0\)"
COMPASS_POSITIONS = r"compute_mrope_for_media\([^()]*\)"
IN_SCRATCH = r"scratch(\1).copy_(\1).to(\2, non_blocking=True)"
LENS_COPY = r"context_lens_cpu\.to\(device, non_blocking=True\)"


def sent(what: str) -> str:
    """The pattern of `what` on its way to the GPU, and of the device."""
    return rf"async_tensor_h2d\(\s*({what}), (\S+?)\s*\)"


@dataclass(frozen=True, eq=False)
class Mutation:
    """A cure that is none: (pattern, replacement) by file.

    The regressions that guard the first file must catch it.
    """

    name: str
    changes: dict[str, list[tuple[str, str]]]

    @property
    def regressions(self) -> list[str]:
        spoilt = next(iter(self.changes))
        return [file for file, paths in REGRESSIONS.items() if spoilt in paths]


MUTATIONS = (
    Mutation(
        "SM90: the reused buffers are pinned, not the copies",
        {
            SM90: [
                (
                    r"(?m)^( +)qo_cpu, kv_cpu, lens_cpu = \($",
                    r"\1if not self._qo_cpu.is_pinned():\n"
                    r"\1    self._qo_cpu = self._qo_cpu.pin_memory()\n"
                    r"\1    self._kv_cpu = self._kv_cpu.pin_memory()\n"
                    r"\1    self._lens_cpu = self._lens_cpu.pin_memory()\n\g<0>",
                )
            ]
        },
    ),
    Mutation(
        "SM90: two of three are pinned",
        {SM90: [(SM90_CALL, r"\1lens_cpu = self._lens_cpu\n\g<0>")]},
    ),
    Mutation(
        "SM90: a reused pinned scratch",
        {
            SM90: [
                (SM90_PIN, "scratch(buffer, id(buffer)).copy_(buffer)\n"),
                (END, SCRATCH),
            ]
        },
    ),
    Mutation(
        "SM90: the copies are allowed to synchronise",
        {
            SM90: [
                (SM90_PIN, "buffer\n"),
                (SM90_CALL, r"\1allowed(self.wrapper.plan)("),
                (END, ALLOWED),
            ]
        },
    ),
    Mutation(
        "SM90: the strict check only warns",
        {SM90: [], SYNC_CHECK: [(r'mode == "error"', 'mode == "never"')]},
    ),
    Mutation(
        "EPLB: a reused pinned scratch",
        {EPLB: [(EPLB_PINNED, "scratch(tensor, len(recv_staging))"), (END, SCRATCH)]},
    ),
    Mutation(
        "EPLB: the copies are allowed to synchronise",
        {
            EPLB: [
                (EPLB_PINNED, 'torch.empty_like(tensor, device="cpu")'),
                (EPLB_COPY, "allowed(dst_tensor.copy_)(cpu_tensor, non_blocking=True)"),
                (END, ALLOWED),
            ]
        },
    ),
    Mutation(
        "EPLB: the copies are synchronous",
        {EPLB: [(EPLB_COPY, "dst_tensor.copy_(cpu_tensor)")]},
    ),
    Mutation(
        "context lengths: out= is dropped",
        {SPARSE: [(LENS_SUBTRACT, r"torch.subtract(\1)")]},
    ),
    Mutation(
        "context lengths: a reused pinned scratch",
        {
            SPARSE: [
                (
                    LENS_PINNED,
                    r"scratch(torch.empty(self.vllm_config.scheduler_config"
                    r".max_num_seqs, \2))[:\1]",
                ),
                (END, SCRATCH),
            ]
        },
    ),
    Mutation(
        "context lengths: the copy is allowed to synchronise",
        {
            SPARSE: [(LENS_PINNED, r"torch.empty(\1, \2)")],
            DENSE: [
                (LENS_COPY, "allowed(context_lens_cpu.to)(device, non_blocking=True)"),
                (END, ALLOWED),
            ],
        },
    ),
    Mutation(
        "plans: fast_decode_plan() is not guarded",
        {
            FLASHINFER: [
                (r"with plan_guard\(\w+\):(\s+fast_decode_plan\()", r"if True:\1")
            ]
        },
    ),
    Mutation(
        "plans: only one wrapper of a cascade is guarded",
        {
            FLASHINFER: [(r"\.cascade_wrapper\.plan\(", r"\g<0>")],
            PLAN_GUARD: [
                (
                    r"wrapper\._batch_prefill_wrappers:\n",
                    r"wrapper._batch_prefill_wrappers[:1]:\n",
                )
            ],
        },
    ),
    Mutation(
        "plans: the event is not recorded",
        {
            FLASHINFER: [],
            PLAN_GUARD: [(r"workspace\.copied\.record\(.*\)\n", "pass\n")],
        },
    ),
    Mutation(
        "plans: the event is recorded on another stream",
        {
            FLASHINFER: [],
            PLAN_GUARD: [
                (
                    r"workspace\.copied\.record\(.*\)\n",
                    "workspace.copied.record(torch.cuda.default_stream())\n",
                )
            ],
        },
    ),
    Mutation(
        "plans: the host waits where it could take a spare workspace",
        {
            FLASHINFER: [],
            PLAN_GUARD: [(r"spare := self\._spares\.take\(self\)", "spare := None")],
        },
    ),
    Mutation(
        "plans: a spare workspace is taken without a look at its event",
        {
            FLASHINFER: [],
            PLAN_GUARD: [(r"and entry\[0\]\.copied\.query\(\):", "and True:")],
        },
    ),
    Mutation(
        "plans: no wait where all workspaces are in flight",
        {
            FLASHINFER: [],
            PLAN_GUARD: [(r"if self\.own\.copied\.query\(\):", "if True:")],
        },
    ),
    Mutation(
        "plans: a workspace is dropped with its wrapper, while it is read",
        {
            FLASHINFER: [],
            PLAN_GUARD: [
                (
                    r"(def __del__\(self\)[^\n]*\n).*retired\.append.*\n",
                    r"\1        pass\n",
                )
            ],
        },
    ),
    Mutation(
        "plans: a captured plan leaves its workspace to later ones",
        {
            FLASHINFER: [],
            PLAN_GUARD: [(r"append\(_pinned_like\(buffer\)\)", "append(buffer)")],
        },
    ),
    Mutation(
        "mm-prefix ranges: a pinned copy of the pinned buffer, which is none",
        {FLASH_ATTN: [(RANGES_PINNED, "staged.pin_memory()")]},
    ),
    Mutation(
        "mm-prefix ranges: the copy of the buffer is pageable",
        {FLASH_ATTN: [(RANGES_PINNED, "staged.clone()")]},
    ),
    Mutation(
        "page tables: the buffers are pinned, not the copies",
        {FLASHINFER: [("pin_memory=False", "pin_memory=True")]},
    ),
    Mutation(
        "input prep: no event with two batches in flight",
        {MODEL_RUNNER: [("max_concurrent_batches > 1", "max_concurrent_batches > 2")]},
    ),
    Mutation(
        "input prep: the host waits for the whole GPU",
        {
            MODEL_RUNNER: [
                (
                    r"self\.prepare_inputs_event\.synchronize\(\)",
                    "torch.cuda.synchronize()",
                )
            ]
        },
    ),
    Mutation(
        "backup tokens: a buffer that is made once",
        {
            path: [
                (
                    r"= (CpuGpuBuffer\(\s*num_reqs, [^)]*\))",
                    r'= self.__dict__.setdefault("made_once", \1)',
                )
            ]
            for path in (DRAFTER, EXTRACT)
        },
    ),
    Mutation(
        "backup tokens: the host waits for the copy",
        {
            path: [
                (
                    r"self\.backup_next_token_ids\.copy_to_gpu\(num_reqs\)",
                    r"\g<0>; torch.cuda.synchronize()",
                )
            ]
            for path in (DRAFTER, EXTRACT)
        },
    ),
    Mutation(
        "bitmask: a pinned copy of the pinned bitmask, which is none",
        {
            BITMASK: [
                (
                    r"grammar_bitmask\.copy\(\)",
                    "torch.from_numpy(grammar_bitmask).pin_memory()",
                )
            ]
        },
    ),
    Mutation(
        "bitmask: a reused pinned scratch",
        {
            BITMASK: [
                (
                    r"grammar_bitmask\.copy\(\)",
                    "scratch(torch.from_numpy(grammar_bitmask))"
                    ".copy_(torch.from_numpy(grammar_bitmask))",
                ),
                (END, SCRATCH),
            ]
        },
    ),
    Mutation(
        "computed tokens: a pinned copy of the pinned buffer, which is none",
        {
            MODEL_RUNNER: [
                (
                    r"(num_computed_tokens_cpu_tensor\[:num_reqs\])\.clone\(\)",
                    r"\1.pin_memory()",
                )
            ]
        },
    ),
    Mutation(
        "allowed tokens: the copy of a pageable mask is allowed to synchronise",
        {
            INPUT_BATCH: [
                (MASK_PINNED, r"\1"),
                (r"\bcopy_slice(\(\s*self\.allowed)", r"allowed(copy_slice)\1"),
                (END, ALLOWED),
            ]
        },
    ),
    Mutation(
        "allowed tokens: the host waits for the copy",
        {INPUT_BATCH: [(MASK_COPIED, r"\g<0>; torch.cuda.synchronize()")]},
    ),
    Mutation(
        "rope positions: pinned columns pinned once more, which copies nothing",
        {
            MODEL_RUNNER: [
                (
                    ROPE_ROWS,
                    r"self.\1_positions.gpu[:, \2].copy_("
                    r"self.\1_positions.cpu[:, \2].pin_memory(), non_blocking=True)",
                )
            ]
        },
    ),
    Mutation(
        "rope positions: the host waits for the copies",
        {MODEL_RUNNER: [(ROPE_ROWS, r"\g<0>; torch.cuda.synchronize()")]},
    ),
    Mutation(
        "pruned positions: the pinned buffer pinned once more, which copies nothing",
        {MODEL_RUNNER: [(PRUNED_NEW, "self.mrope_positions.cpu.pin_memory()")]},
    ),
    Mutation(
        "pruned positions: the host waits for the last copy",
        {MODEL_RUNNER: [(PRUNED_NEW, r"\g<0>; torch.cuda.synchronize()")]},
    ),
    Mutation(
        "Cohere Compass: ids in a reused pinned scratch",
        {COMPASS: [(sent(COMPASS_IDS), IN_SCRATCH), (END, SCRATCH)]},
    ),
    Mutation(
        "Cohere Compass: positions in a reused pinned scratch",
        {COMPASS: [(sent(COMPASS_POSITIONS), IN_SCRATCH), (END, SCRATCH)]},
    ),
    Mutation(
        "Cohere Compass: the copies are allowed to synchronise",
        {
            COMPASS: [
                (
                    sent(f"{COMPASS_IDS}|{COMPASS_POSITIONS}"),
                    r"allowed(\1.to)(\2, non_blocking=True)",
                ),
                (END, ALLOWED),
            ]
        },
    ),
    Mutation(
        "dots3: ids in a reused pinned scratch",
        {DOTS3: [(sent("pos_ids"), IN_SCRATCH), (END, SCRATCH)]},
    ),
    Mutation(
        "dots3: bounds in a reused pinned scratch",
        {DOTS3: [(sent("cu_seqlens_cpu"), IN_SCRATCH), (END, SCRATCH)]},
    ),
    Mutation(
        "multimodal inputs: a reused pinned scratch",
        {
            MULTIMODAL: [
                (
                    r"torch\.empty\(\s*x\.shape, dtype=x\.dtype, pin_memory=True\s*\)",
                    r"scratch(x)",
                ),
                (END, SCRATCH),
            ]
        },
    ),
    Mutation(
        "multimodal inputs: pinned, but with the gaps between its columns",
        {MULTIMODAL: [(r"x\.is_pinned\(\) and x\.is_contiguous\(\)", "x.is_pinned()")]},
    ),
    Mutation(
        "step5 chunks: a reused pinned scratch",
        {STEP5_CHUNKS: [(KEYS_PINNED, r"scratch(\1, start)"), (END, SCRATCH)]},
    ),
    Mutation(
        "step5 chunks: the query offsets are pageable",
        {STEP5_CHUNKS: [(QUERIES_PINNED, r"\1")]},
    ),
    Mutation(
        "step5 chunks: the key offsets are pageable",
        {STEP5_CHUNKS: [(KEYS_PINNED, r"torch.empty_like(\1)")]},
    ),
    Mutation(
        "step5 chunks: the copies are allowed to synchronise",
        {
            STEP5_CHUNKS: [(KEYS_PINNED, r"torch.empty_like(\1)")],
            STEP5: [
                (r"self\._attention\.plan\(", "allowed(self._attention.plan)("),
                (END, ALLOWED),
            ],
        },
    ),
    Mutation(
        "step5 plans: the guard is off",
        {STEP5: [(STEP5_GUARD, r"\1if True:")]},
    ),
    Mutation(
        "step5 plans: the host waits before each",
        {STEP5: [(STEP5_GUARD, r"\1torch.cuda.current_stream().synchronize()\n\g<0>")]},
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How one test ended: passed, failed, skipped or xfailed; why, and in full."""

    result: str
    message: str = ""
    report: str = ""


Outcomes = dict[str, Outcome]


def run_tests(tree: Path, test_file: Path, *options: str) -> Outcomes:
    """Run one file of tests with the vLLM of `tree`; how each test ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        path = os.pathsep.join(
            p for p in (str(tree), os.environ.get("PYTHONPATH")) if p
        )
        command = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                *("-c", os.devnull, "--rootdir", folder, f"--junitxml={report}"),
                *("-W", "ignore::pytest.PytestUnknownMarkWarning", *options),
                str(test_file),
            ],
            env={**os.environ, "PYTHONPATH": path, "VLLM_GPU_SYNC_CHECK": "error"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = command.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(command.pid, signal.SIGKILL)
            said = f"killed after {TIMEOUT} s\n" + command.communicate()[0]
        if not report.exists():
            return {"(collection)": Outcome("failed", said[-300:], said)}
        return {
            case.get("name", ""): _outcome(case)
            for case in ET.parse(report).iter("testcase")
        }


def run_on_both(
    unpatched: Path, patched: Path, folder: Path, files: list[str]
) -> dict[str, tuple[Outcomes, Outcomes]]:
    """Run the `files` of tests in `folder` on both trees; by file, how they ended."""
    with ThreadPoolExecutor(JOBS) as pool:
        ran = {
            file: [
                pool.submit(run_tests, tree, folder / file)
                for tree in (unpatched, patched)
            ]
            for file in files
        }
    return {file: (one.result(), other.result()) for file, (one, other) in ran.items()}


def _outcome(case: ET.Element) -> Outcome:
    for tag, result in (
        ("failure", "failed"),
        ("error", "failed"),
        ("skipped", "skipped"),
    ):
        if (found := case.find(tag)) is not None:
            if found.get("type") == "pytest.xfail":
                result = "xfailed"
            message, report = found.get("message", ""), found.text or ""
            if message == "collection skipped":  # the report has the reason
                message = report.rsplit("Skipped: ", 1)[-1].rstrip("\"')\n")
            return Outcome(result, message, report)
    return Outcome("passed")


def changed_lines(unpatched: Path, patched: Path, paths: Sequence[str]) -> list[str]:
    """Lines that the edits of `paths` changed; none where cured by the release, or absent."""
    one, other = (
        [
            line
            for path in paths
            if (tree / path).exists()
            for line in (tree / path).read_text().splitlines()
        ]
        for tree in (unpatched, patched)
    )
    return [line for line in difflib.unified_diff(one, other, n=0) if line[0] in "+-"]


def has_edit(name: str, changed: Sequence[str]) -> bool:
    """Whether what `changed` has the edit that a test guards."""
    parts = re.split(r"\W", name)
    pattern = next((LINES[part] for part in parts if part in LINES), "")
    return any(re.search(pattern, line) for line in changed)


def verdict(name: str, guards: bool, before: Outcome, after: Outcome) -> str:
    """What is wrong with a regression that ended so, empty if nothing."""
    if after.result == "failed":
        return "fails patched"
    brought = guards and not name.startswith("test_pinned_")
    if brought and before.result == "skipped" and NO_MODULE.search(before.message):
        return ""
    if "skipped" in (before.result, after.result):
        return "" if before.result == after.result else "skipped on one tree only"
    if not name.startswith("test_pinned_"):
        return ""
    if not guards:
        return "" if before.result == "passed" else "fails, but the trees are alike"
    if before.result != "failed":
        return "vacuous: passes unpatched"
    if not FAULT.search(before.message):
        return "unpatched it fails for another reason"
    return ""


def compare(
    unpatched: Path, patched: Path, files: list[str]
) -> tuple[dict[str, Outcomes], list[str]]:
    """Run regressions on both trees, print the table; patched outcomes and ills."""
    ran = run_on_both(unpatched, patched, TESTS, files)
    ills: list[str] = []
    print(f"{'test':78} {'unpatched':>10} {'patched':>10}")
    for file, (before, after) in ran.items():
        paths = REGRESSIONS[file]
        changed = changed_lines(unpatched, patched, paths)
        print(f"{file}{'' if changed else ' (cured by the release, or absent)'}")
        if len(before) == 1 and before.keys() != after.keys():
            (only,) = before.values()
            if only.result == "skipped":  # the file as a whole, with its reason
                before = dict.fromkeys(after, only)
        for name in sorted({*before, *after}):
            one = before.get(name, Outcome("skipped", "not run"))
            other = after.get(name, Outcome("skipped", "not run"))
            ill = verdict(name, has_edit(name, changed), one, other)
            print(f"  {name:76} {one.result:>10} {other.result:>10} {ill}")
            if ill:
                ills.append(f"{name}: {ill}")
                failed = other if other.result == "failed" else one
                print("\n".join(failed.report.splitlines()[-25:]))
    return {file: after for file, (_, after) in ran.items()}, ills


def mutate(patched: Path, mutation: Mutation, root: Path) -> bool:
    """Make `root` the patched tree with the mutation; False where it has no place."""
    if not all((patched / path).exists() for path in mutation.changes):
        return False
    shutil.copytree(patched / "vllm", root / "vllm", copy_function=os.link)
    for path, changes in mutation.changes.items():
        text = (root / path).read_text()
        for pattern, new in changes:
            text, count = re.subn(pattern, new, text)
            if not count:
                return False
        (root / path).unlink()  # a link to the patched tree's file
        (root / path).write_text(text)
        compile(text, path, "exec")
    return True


def run_mutations(patched: Path, sound: dict[str, Outcomes]) -> list[str]:
    """Run each mutation and print what catches it; those that nothing catches."""

    def run(mutation: Mutation, root: Path) -> str | None:
        """The test that catches it, empty if none does; None if it has no place."""
        root.mkdir()
        if not mutate(patched, mutation, root):
            return None
        for file in mutation.regressions:
            passed = {n for n, o in sound.get(file, {}).items() if o.result == "passed"}
            found = run_tests(root, TESTS / file, "-x") if passed else {}
            failed = {n for n, o in found.items() if o.result == "failed"}
            if caught := failed & (passed | {"(collection)"}):
                return min(caught)
        return ""

    missed = []
    print("\nmutation of the cure, and what catches it")
    with (
        tempfile.TemporaryDirectory(dir=patched.parent) as folder,
        ThreadPoolExecutor(JOBS) as pool,
    ):
        caught = {
            mutation: pool.submit(run, mutation, Path(folder, str(number)))
            for number, mutation in enumerate(MUTATIONS)
            if not sound.keys().isdisjoint(mutation.regressions)
        }
        for mutation, future in caught.items():
            test = future.result()
            if test is None:
                test = "no place for it in this release"
            elif not test and not sound.keys() >= {*mutation.regressions}:
                test = "not by the regressions given; others guard its file, too"
            elif not test:
                test = "NOT CAUGHT"
                missed.append(f"{mutation.name}: not caught")
            print(f"  {mutation.name:68} {test}", flush=True)
    return missed


def run_upstream(unpatched: Path, patched: Path, folder: Path) -> None:
    """Run vLLM's own tests on both trees; print counts and every difference."""
    names = [name for name in UPSTREAM if (folder / name).exists()]
    ran = run_on_both(unpatched, patched, folder, names)
    print("\nvLLM's own tests (unpatched; patched)")
    for name, (before, after) in ran.items():
        print(f"  {name}: {_counts(before)}; {_counts(after)}")
        for test in sorted({*before, *after}):
            pair = before.get(test), after.get(test)
            results = [outcome.result if outcome else "not run" for outcome in pair]
            if results[0] != results[1]:
                print(f"    {test}: {results[0]}; {results[1]}")


def _counts(outcomes: Outcomes) -> str:
    results = [outcome.result for outcome in outcomes.values()]
    return ", ".join(f"{results.count(r)} {r}" for r in sorted(set(results))) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("unpatched", type=lambda text: Path(text).resolve())
    parser.add_argument("patched", type=lambda text: Path(text).resolve())
    parser.add_argument("regressions", nargs="*", metavar="REGRESSION", default=[""])
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--upstream", type=lambda text: Path(text).resolve())
    arguments = parser.parse_args()
    for tree in (arguments.unpatched, arguments.patched):
        if not (tree / "vllm/__init__.py").is_file():
            parser.error(f"{tree} holds no vllm/; give the folder that does")
    files = [f for f in REGRESSIONS if any(r in f for r in arguments.regressions)]
    sound, ills = compare(arguments.unpatched, arguments.patched, files)
    if arguments.mutations:
        ills += run_mutations(arguments.patched, sound)
    if arguments.upstream:
        run_upstream(arguments.unpatched, arguments.patched, arguments.upstream)
    print()
    together = {f"{f}/{n}": o for f, found in sound.items() for n, o in found.items()}
    print(f"patched: {_counts(together)}; {len(ills)} complaints")
    reasons = Counter(
        o.message.splitlines()[0] for o in together.values() if o.result == "skipped"
    )
    for reason, count in reasons.items():
        print(f"  {count} skipped: {reason}")
    for ill in ills:
        print(f"  {ill}")
    return int(bool(ills))


if __name__ == "__main__":
    sys.exit(main())
