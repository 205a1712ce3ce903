# SPDX-License-Identifier: Apache-2.0
"""One scenario on the vLLM that is imported, in a process of its own: see run.py.

    python engine.py SCENARIO RESULT.json RACE_CHECK.py [RANK]

Generates, mostly twice with the same engine, and writes token ids and logprobs, or how
it ended. RACE_CHECK.py is installed if VLLM_H2D_RACE_CHECK is set and this vLLM has no
race check of its own. A scenario of several ranks runs itself once more for each.

The models have the shapes of real ones with few layers, and random weights, each
tensor from a seed of its own name, so that every process has the same. vLLM's dummy
weights would not do: they also make the norms 1e-3, and attention then vanishes in
the rounding of the residual stream, right or wrong. Of experts each has a seed of its
own, so that all copies of one are equal on all ranks.
"""

import contextlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import eplb

RACE_CHECK = "vllm.utils.h2d_race_check"
VOCABULARY = 2048
TOP = 4  # logprobs kept for each position
BUSY_CYCLES = 10_000_000  # of the GPU's clock, about 5 ms

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_parameters": ROPE,
}
QWEN3_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_parameters": ROPE,
}
MLA = COMMON | {
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 512,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_parameters": ROPE,
}
INDEXER = {
    "q_lora_rank": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
DEEPSEEK_V32 = (
    MLA
    | INDEXER
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_nextn_predict_layers": 1,
    }
)
GLM_NOPE = (
    MLA
    | INDEXER
    | {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "n_group": 1,
        "topk_group": 1,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_kpool": 16,
        "indexer_rope_interleave": True,
        "mla_use_nope": True,
        "pad_token_id": None,
        "mhc": False,  # its kernels are TileLang's
        "layer_types": ["full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": None,
    }
)
DEEPSEEK_V2 = MLA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
}

EAGER = {"enforce_eager": True}
GRAPHS = {
    "compilation_config": {
        "mode": 0,  # no torch.compile: compiling takes minutes
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32],
    }
}
SPARSE = {
    "attention_config": {
        "backend": "FLASHINFER_MLA_SPARSE_SM90",
        "sparse_mla_force_mqa": True,  # or prefill needs flash-attn
    },
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
}
FLASHINFER = {
    "attention_config": {"backend": "FLASHINFER", "use_trtllm_attention": False},
    "async_scheduling": True,
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,
}
TRITON = {
    "attention_config": {"backend": "TRITON_ATTN"},
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,
}
# A rebalance at every eighth step, over Gloo, which is staged in host memory.
EPLB = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "external_launcher",
    "disable_custom_all_reduce": True,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {
        "communicator": "torch_gloo",
        "num_redundant_experts": 4,
        "window_size": 8,
        "step_interval": 8,
        "use_async": False,
    },
}
RUNNER_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}

# (prompt length, output length): chunked prefills mixed with decodes.
LONG = ((300, 24), (3000, 24), (5, 48), (64, 40), (700, 32), (2500, 16), (1500, 24))
LENGTHS = (
    *(7, 150, 33, 900, 64, 410, 1200, 18, 257, 80, 600, 1),
    *(1023, 45, 330, 16, 511, 120, 705, 9, 222, 1100, 63, 380),
)
MANY = tuple((length, 64 + 4 * (n % 9)) for n, length in enumerate(LENGTHS))


@dataclass(frozen=True)
class Scenario:
    """A model, the options of vllm.LLM, and requests as (prompt, output) lengths."""

    model: dict[str, Any]
    options: dict[str, Any]
    requests: tuple[tuple[int, int], ...]
    environment: dict[str, str] = field(default_factory=dict)
    draft: dict[str, Any] | None = None
    # The file whose fault ends the engine under the strict sync check.
    fatal: str | None = None
    # Keep the GPU a step behind the host, where a rewritten copy shows.
    busy: bool = False
    # Prompts that repeat themselves, for drafts by n-gram.
    repeats: bool = False
    # A regular expression that the output has to match.
    regex: str | None = None
    # Of the weights: 1.0 keeps activations the size they are. More makes attention
    # peaked, but small differences grow from layer to layer.
    scale: float = 2.0
    # How often one engine generates. Once, where the second time differs by right;
    # often, where two times in a few differ, to see by how much.
    generations: int = 2
    # Processes of the engine, which share the GPU; more than one are checked as EPLB.
    ranks: int = 1
    # Why the strict sync check is left off, where it cannot be on.
    unchecked: str = ""


SM90 = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
SCENARIOS = {
    "sparse-mla": Scenario(
        DEEPSEEK_V32, SPARSE | EAGER, LONG, fatal=SM90, scale=1.0, generations=6
    ),
    "sparse-mla-graphs": Scenario(
        DEEPSEEK_V32, SPARSE | GRAPHS, LONG, fatal=SM90, scale=1.0, generations=6
    ),
    "sparse-mla-mtp": Scenario(
        DEEPSEEK_V32,
        SPARSE
        | EAGER
        | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        LONG,
        fatal=SM90,
        scale=1.0,
        generations=6,
    ),
    "sparse-mla-nope": Scenario(
        GLM_NOPE, SPARSE | EAGER, LONG, fatal=SM90, scale=1.0, generations=6
    ),
    "dense-flashinfer": Scenario(LLAMA, FLASHINFER | GRAPHS, MANY, busy=True),
    "dense-flashinfer-eager": Scenario(LLAMA, FLASHINFER | EAGER, MANY, busy=True),
    "dense-flashinfer-v1": Scenario(
        LLAMA, FLASHINFER | GRAPHS, MANY, RUNNER_V1, busy=True
    ),
    "dense-flashinfer-ngram": Scenario(
        LLAMA,
        FLASHINFER
        | GRAPHS
        | {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            }
        },
        MANY,
        busy=True,
        repeats=True,
    ),
    "dense-flashinfer-draft": Scenario(
        LLAMA,
        FLASHINFER
        | GRAPHS
        | {
            "speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}
        },
        MANY,
        draft=LLAMA | {"num_hidden_layers": 1},
        busy=True,
    ),
    "dense-flashinfer-eagle": Scenario(
        LLAMA,
        FLASHINFER
        | GRAPHS
        | {"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}},
        MANY,
        draft=LLAMA
        | {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]},
        busy=True,
    ),
    "moe-triton": Scenario(QWEN3_MOE, TRITON | EAGER, MANY, busy=True),
    "moe-triton-v1": Scenario(QWEN3_MOE, TRITON | EAGER, MANY, RUNNER_V1, busy=True),
    "moe-triton-structured": Scenario(
        QWEN3_MOE, TRITON | EAGER, MANY[:8], busy=True, regex="([0-9]{3}, ){40}"
    ),
    # Where an expert is computed rounds the sum over the ranks. One generation repeats
    # that, a second starts with other placements.
    "moe-eplb": Scenario(
        QWEN3_MOE,
        TRITON | EAGER | EPLB,
        MANY,
        eplb.ENVIRONMENT,
        generations=1,
        ranks=2,
    ),
    # Experts move in the background, when they are there.
    "moe-eplb-async": Scenario(
        QWEN3_MOE,
        TRITON
        | EAGER
        | EPLB
        | {"eplb_config": EPLB["eplb_config"] | {"use_async": True}},
        MANY,
        eplb.ENVIRONMENT,
        scale=1.0,
        ranks=2,
    ),
    "mla-dense": Scenario(
        DEEPSEEK_V2,
        {
            "attention_config": {"backend": "TRITON_MLA"},
            "max_num_batched_tokens": 2048,
            "max_model_len": 4096,
        }
        | EAGER,
        LONG,
    ),
}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # greedy needs none of its kernels
}


def prompts(scenario: Scenario) -> list[list[int]]:
    """The token ids of each prompt, the same in every process."""
    made = []
    for number, (length, _) in enumerate(scenario.requests):
        tokens = random.Random(number).choices(range(3, VOCABULARY), k=length)
        made.append((tokens[:11] * length)[:length] if scenario.repeats else tokens)
    return made


def write_model(folder: Path, config: dict[str, Any], tokenizer: bool = False) -> str:
    """Write config.json, with a tokenizer of one token a byte if wanted."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bytewise.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(
            tokenizer_object=bytewise, eos_token="<eos>"
        ).save_pretrained(folder)
    return str(folder)


def options(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """The arguments of vllm.LLM; the models' folders are made in `folder`."""
    made = scenario.options | {
        "model": write_model(folder / "model", scenario.model, bool(scenario.regex)),
        "load_format": "seeded",
        "skip_tokenizer_init": scenario.regex is None,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "enable_flashinfer_autotune": False,
        # Leaves room for others on the GPU, and measures no memory beside them.
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 0,
    }
    if scenario.draft is not None:
        made["speculative_config"] = made["speculative_config"] | {
            "model": write_model(folder / "draft", scenario.draft)
        }
    return made


def register_seeded_weights(scale: float) -> None:
    """Make load_format "seeded" known to vLLM; `scale` is fill()'s."""
    import torch

    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("seeded")
    class SeededLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            rank, ranks = (
                torch.distributed.get_rank(),
                torch.distributed.get_world_size(),
            )
            split = split_weights(model) if ranks > 1 else set()
            for name, weight in model.named_parameters():
                if ".experts." in name and weight.ndim == 3:
                    slots = len(weight)
                    experts = getattr(model, "num_logical_experts", 0) or slots * ranks
                    for slot in range(slots):
                        expert = expert_of_slot(rank * slots + slot, experts)
                        fill(f"{name}, expert {expert}", weight.data[slot], scale)
                else:
                    fill(
                        f"{name}, rank {rank}" if name in split else name, weight, scale
                    )


def expert_of_slot(slot: int, experts: int) -> int:
    """The expert that vLLM loads into a slot: after all, the first ones again."""
    return slot % experts


def split_weights(model: Any) -> set[str]:
    """The parameters of which each rank of the model has another part."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )

    kinds = ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, kinds)
        for name, _ in module.named_parameters(recurse=False)
    }


def fill(name: str, weight: Any, scale: float) -> None:
    """Fill a parameter from a seed of its name.

    Matrices keep the size of what they multiply if `scale` is 1. At 2, attention is
    peaked rather than a mean, and a token attended to wrongly changes what is
    generated.
    """
    import torch

    if not weight.is_floating_point():
        weight.zero_()
    elif weight.ndim < 2:
        weight.fill_(0.0 if "bias" in name else 1.0)
    else:
        generator = torch.Generator(weight.device).manual_seed(
            zlib.crc32(name.encode())
        )
        usual = 1.0 if "embed_tokens" in name else scale / weight.shape[-1] ** 0.5
        weight.normal_(0.0, usual, generator=generator)


def keep_busy() -> None:
    """Queue a long kernel before each step, ahead of the copies of its inputs."""
    import torch

    from vllm.v1.worker.gpu_worker import Worker

    execute_model = Worker.execute_model

    def busy(self: Worker, *args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(BUSY_CYCLES)
        return execute_model(self, *args, **kwargs)

    Worker.execute_model = busy


def outputs(llm: Any, scenario: Scenario) -> list[dict[str, Any]]:
    """Generate greedily; by request, its tokens and the best logprobs of each."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=length,
            ignore_eos=True,
            logprobs=TOP,
            detokenize=False,
            structured_outputs=_structure(scenario),
        )
        for _, length in scenario.requests
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(scenario)]
    return [
        {
            "tokens": list(done.outputs[0].token_ids),
            "logprobs": [
                {str(token): score.logprob for token, score in position.items()}
                for position in done.outputs[0].logprobs
            ],
        }
        for done in llm.generate(asked, params, use_tqdm=False)
    ]


def _structure(scenario: Scenario) -> Any:
    if scenario.regex is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(regex=scenario.regex)


@contextlib.contextmanager
def phase(result: dict[str, Any], name: str) -> Iterator[None]:
    """Time a phase; an error in it is the result's."""
    start = time.perf_counter()
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        message = str(error).strip() or type(error).__name__
        result["error"] = {
            "phase": name,
            "message": message.splitlines()[0],
            "at": time.time(),  # tells which rank was first
        }
        raise
    finally:
        result[f"{name}_seconds"] = round(time.perf_counter() - start, 1)


def install_race_check(path: Path) -> None:
    """Install the check at `path` in a vLLM that has none; patched does it itself."""
    if importlib.util.find_spec(RACE_CHECK) is None:
        spec = importlib.util.spec_from_file_location(RACE_CHECK, path)
        sys.modules[RACE_CHECK] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.install_h2d_race_check()


def races() -> dict[str, int]:
    """Where the check saw races, the innermost frames last, and how often."""
    module = sys.modules.get(RACE_CHECK)
    if module is None:
        raise RuntimeError("this vLLM did not install its race check")
    check = module.install_h2d_race_check()
    check.check()
    if not check.counts["compared"]:
        raise RuntimeError("the race check saw no copy")
    return {
        " > ".join(f"{_short(file)}:{line}" for file, line, _ in stack[-3:]): count
        for stack, count in check.seen.items()
    }


def _short(file: str) -> str:
    """A file as from its package on."""
    parts = Path(file).parts
    for package in ("vllm", "flashinfer", "torch"):
        if package in parts:
            return "/".join(parts[parts.index(package) :])
    return file


def run(
    scenario: Scenario,
    result: dict[str, Any],
    path: Path,
    race_check: Path | None,
    rank: int,
) -> None:
    rebalances = eplb.Rebalances() if scenario.ranks > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        with phase(result, "start"):
            from vllm import LLM

            if race_check is not None:
                install_race_check(race_check)
            register_seeded_weights(scenario.scale)
            if scenario.busy:
                keep_busy()
            if rebalances is not None:
                eplb.join(rank, scenario.ranks, path.with_name("ranks"))
                rebalances.watch()
            llm = LLM(**options(scenario, Path(folder)))
            newer = llm.llm_engine.vllm_config.use_v2_model_runner
            result["runner"] = "V2" if newer else "V1"
        path.write_text(json.dumps(result))  # what there is, should it be killed
        with phase(result, "generate"):
            if rebalances is not None:
                rebalances.moved.clear()  # those of the warm-up
            made = [outputs(llm, scenario) for _ in range(scenario.generations)]
            if race_check is not None:
                result["races"] = races()
            if rebalances is not None:
                rebalances.demand()
                eplb.meet()
                result["moved"] = rebalances.moved
            result["outputs"] = made


def main() -> None:
    name, path, check = sys.argv[1], *map(Path, sys.argv[2:4])
    scenario = SCENARIOS[name]
    if scenario.ranks > 1 and len(sys.argv) == 4:
        eplb.start_ranks(scenario.ranks, [__file__, name], path, [str(check)])
        return
    os.environ.update(ENVIRONMENT | scenario.environment)
    raced = "VLLM_H2D_RACE_CHECK" in os.environ
    rank = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    result: dict[str, Any] = {}
    with contextlib.suppress(BaseException):  # phase() has it
        run(scenario, result, path, check if raced else None, rank)
    path.write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine that died may not let the process end


if __name__ == "__main__":
    main()
