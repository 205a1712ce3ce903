# SPDX-License-Identifier: Apache-2.0
"""The pipeline: Buildkite's schema, what every step has, and which jobs there are."""

import ast
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.version import Version

from tests.buildkite.conftest import ROOT
from vllm_pinned.fetch import fetch

FOLDER = ROOT / ".buildkite"
TEXT = (FOLDER / "pipeline.yaml").read_text()
PIPELINE = yaml.safe_load(TEXT)
STEPS: dict[str, dict[str, Any]] = {step["key"]: step for step in PIPELINE["steps"]}
LOST_AGENT = {
    (-1, "none", "none"),
    (-1, "*", "agent_stop"),
    ("*", "*", "agent_stop"),
}
BIN = Path(sys.executable).parent
accuracy = SimpleNamespace(**runpy.run_path(str(FOLDER / "accuracy.py")))
control = SimpleNamespace(
    **runpy.run_path(str(ROOT / "tests/controls/run.py"), run_name="control")
)
engine = SimpleNamespace(
    **runpy.run_path(str(ROOT / "tests/engine/run.py"), run_name="run")
)


def jobs(step: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The values of a step's matrix, a job each, by what stands for them."""
    matrix = step.get("matrix")
    if matrix is None:
        yield {}
    elif isinstance(matrix, list):
        yield from ({"{{matrix}}": value} for value in matrix)
    else:
        setup = matrix["setup"]
        combined = [
            dict(zip(setup, values, strict=True))
            for values in itertools.product(*setup.values())
        ]
        for values in combined + [more["with"] for more in matrix["adjustments"]]:
            yield {f"{{{{matrix.{name}}}}}": value for name, value in values.items()}


def commands(step: dict[str, Any]) -> Iterator[list[str]]:
    for values in jobs(step):
        command = step["command"]
        for name, value in values.items():
            command = command.replace(name, value)
        assert "{{" not in command
        yield shlex.split(command)


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", "vendor.buildkite", path],
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_fits_the_schema(tmp_path: Path) -> None:
    done = check_schema(FOLDER / "pipeline.yaml")
    assert done.returncode == 0, done.stdout
    misspelt = tmp_path / "pipeline.yaml"
    misspelt.write_text(TEXT.replace("timeout_in_minutes", "timeout_minutes"))
    assert check_schema(misspelt).returncode == 1


def test_scripts_pass_shellcheck() -> None:
    scripts = sorted(FOLDER.glob("*.sh"))
    assert scripts
    subprocess.run([BIN / "shellcheck", *scripts], check=True)
    for script in scripts:
        assert "\nset -euo pipefail\n" in script.read_text()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_step_has_what_it_must(step: dict[str, Any]) -> None:
    assert 0 < step["timeout_in_minutes"] <= 120
    assert step["artifact_paths"] in ("dist/*", "build/**/*")
    assert step["agents"] in PIPELINE["hardware"].values()
    rules = {
        (
            rule.get("exit_status", "*"),
            rule.get("signal", "*"),
            rule.get("signal_reason", "*"),
        )
        for rule in step["retry"]["automatic"]
    }
    assert rules == LOST_AGENT
    assert "soft_fail" not in step


def test_agents_and_the_strict_check_are_set_once() -> None:
    assert PIPELINE["env"] == {"VLLM_GPU_SYNC_CHECK": "error"}
    files = [path.read_text() for path in FOLDER.iterdir() if path.is_file()]
    assert sum(text.count("VLLM_GPU_SYNC_CHECK") for text in files) == 1
    assert len(re.findall(r"agents: (?!\*)", TEXT)) == 0
    assert "soft_fail" not in TEXT
    assert "$" not in TEXT  # an upload would interpolate it


def test_steps_wait_for_the_wheel_that_they_install() -> None:
    assert len(STEPS) == len(PIPELINE["steps"])
    assert STEPS["wheel"]["command"] == "make wheel"
    assert STEPS["wheel"]["artifact_paths"] == "dist/*"
    assert "if_changed" not in STEPS["wheel"]
    for key, step in STEPS.items():
        installs = step["command"].startswith(".buildkite/")
        assert step.get("depends_on") == ("wheel" if installs else None), key
    for script in ("accuracy.sh", "engine.sh", "regressions.sh"):
        assert "\n.buildkite/install.sh\n" in (FOLDER / script).read_text()


def test_commands_exist() -> None:
    for step in STEPS.values():
        for program, *_ in commands(step):
            if "/" in program:
                assert os.access(ROOT / program, os.X_OK), program


def select(*changed: str) -> set[str]:
    """The keys of the steps that run where these paths changed."""

    def matches(pattern: str, path: str) -> bool:
        if pattern.endswith("/**"):
            return path.startswith(pattern.removesuffix("**"))
        assert "*" not in pattern
        return path == pattern

    return {
        key
        for key, step in STEPS.items()
        if "if_changed" not in step
        or any(matches(p, path) for p in step["if_changed"] for path in changed)
    }


def test_changed_paths_select_jobs() -> None:
    always = {"wheel", "tests"}
    accuracies = {"eplb-accuracy-h100", "eplb-accuracy-b200", "pcp-accuracy"}
    regressions = {"regressions-h100", "regressions-h200", "regressions-b200"}
    engines = {"engines", "engines-race-check"}
    assert select("README.md", "tests/vllm_pinned/test_wheel.py") == always
    assert select("tests/v1/attention/test_mla_context_lens.py") == always | regressions
    assert select("tests/distributed/test_eplb_gloo_staging.py") == always | {
        "eplb-execution"
    }
    assert select("tests/engine/eplb.py") == always | engines
    backend = "vllm/v1/attention/backends/flashinfer.yml"
    assert select(backend) == always | accuracies | regressions | engines
    for path in (
        "vllm/distributed/eplb/eplb_communicator.yml",
        "vllm_pinned/wheel.py",
        "Makefile",
        "pyproject.toml",
        ".buildkite/install.sh",
    ):
        assert select(path) == set(STEPS)
    for step in STEPS.values():
        for pattern in step.get("if_changed", []):
            assert (ROOT / pattern.removesuffix("/**")).exists(), pattern


def ran(key: str) -> list[str]:
    """The regressions that the jobs of a step run, at their paths below tests/."""
    files = []
    for _, name in commands(STEPS[key]):
        path = ROOT / name
        found = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        assert found
        files += [file.relative_to(ROOT / "tests").as_posix() for file in found]
    return files


@pytest.mark.parametrize("hardware", ["h100", "h200", "b200"])
def test_every_regression_runs_once_on_all_hardware(hardware: str) -> None:
    sm90 = {"v1/attention/test_flashinfer_mla_sparse_sm90_plan.py"}
    expected = {*control.REGRESSIONS} - {*ran("eplb-execution")}
    if hardware == "b200":
        expected -= sm90
    found = ran(f"regressions-{hardware}")
    assert sorted(found) == sorted(expected)
    assert STEPS[f"regressions-{hardware}"]["agents"]["hardware"] == hardware


@pytest.mark.parametrize(
    ("key", "options", "left_out"),
    [
        ("engines", [], set()),
        # Gloo waits for the GPU at each collective: EPLB lets nothing fall behind.
        ("engines-race-check", ["--race-check"], {"moe-eplb", "moe-eplb-async"}),
    ],
)
def test_every_engine_runs_once(
    key: str, options: list[str], left_out: set[str]
) -> None:
    found = []
    for script, *arguments, part in commands(STEPS[key]):
        assert (script, arguments) == (".buildkite/engine.sh", options)
        found += [name for name in engine.SCENARIOS if part in name]
    assert sorted(found) == sorted(engine.SCENARIOS.keys() - left_out)
    assert STEPS[key]["agents"] == {"hardware": "h200", "gpus": 1}


def evaluations(key: str) -> list[tuple[str, float, int, str]]:
    found = []
    for script, *arguments in commands(STEPS[key]):
        assert script == ".buildkite/accuracy.sh"
        parsed = accuracy.parse(arguments)
        assert parsed.task == "gsm8k"
        options = " ".join(parsed.options)
        found.append((parsed.model, parsed.threshold, parsed.limit, options))
    return found


@pytest.mark.parametrize("hardware", ["h100", "b200"])
def test_eplb_accuracy(hardware: str) -> None:
    found = evaluations(f"eplb-accuracy-{hardware}")
    backends = []
    for model, threshold, questions, options in found:
        assert (model, threshold, questions) == ("Qwen/Qwen3-30B-A3B-FP8", 0.8, 200)
        assert "--enable-eplb --eplb-config.use_async=false" in options
        backends += re.findall("--all2all-backend ([a-z_]+)", options)
    assert backends == ["deepep_high_throughput", "deepep_low_latency"]
    assert STEPS[f"eplb-accuracy-{hardware}"]["agents"]["hardware"] == hardware


def test_pcp_accuracy() -> None:
    found = evaluations("pcp-accuracy")
    sizes = []
    for model, threshold, questions, options in found:
        assert (model, threshold, questions) == ("nvidia/GLM-5.2-NVFP4", 0.82, 200)
        sizes += re.findall(
            "--tensor-parallel-size ([0-9]) --prefill-context-parallel-size ([0-9])",
            options,
        )
    assert sizes == [("2", "2"), ("1", "4")]


class Release:
    """What the release that the wheel is made of says of its server's options."""

    def __init__(self, wheel: zipfile.ZipFile) -> None:
        self.options: set[str] = set()
        self.fields: dict[str, dict[str, ast.expr]] = defaultdict(dict)
        self.choices: dict[str, set[str]] = {}
        for name in wheel.namelist():
            if re.fullmatch(r"vllm/(config/\w+|engine/arg_utils)\.py", name):
                for node in ast.walk(ast.parse(wheel.read(name))):
                    self._read(node)

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=names):
                self.options |= _strings(*names)
            case ast.ClassDef(name=name, body=body):
                for line in body:
                    if isinstance(line, ast.AnnAssign):
                        self.fields[name][ast.unparse(line.target)] = line.annotation
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value)
                | ast.AnnAssign(
                    target=ast.Name(id=name), value=ast.Subscript() as value
                )
            ):  # of the form Literal[...]
                self.choices[name] = _strings(value)

    def refuses(self, tokens: list[str]) -> list[str]:
        """The options that it does not have, or not with that value."""
        refused = []
        for token, after in itertools.pairwise([*tokens, "--"]):
            name, _, value = token.partition("=")
            name, _, inner = name.partition(".")
            if not name.startswith("--"):
                continue
            field = inner or name.removeprefix("--").replace("-", "_")
            types = [found[field] for found in self.fields.values() if field in found]
            choices = set().union(
                *(
                    self.choices.get(part.id, set())
                    for found in types
                    for part in ast.walk(found)
                    if isinstance(part, ast.Name)
                )
            )
            exists = name in self.options and (types or not inner)
            if not exists or (choices and (value or after) not in choices):
                refused.append(token)
        return refused


def _strings(*nodes: ast.AST) -> set[str]:
    return {
        part.value
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


@pytest.fixture(scope="session")
def release() -> Release:
    default = re.search(r"^VLLM \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert default
    with zipfile.ZipFile(fetch(Version(default[1]))) as wheel:
        return Release(wheel)


@pytest.mark.parametrize(
    "key", [key for key, step in STEPS.items() if "accuracy.sh" in step["command"]]
)
def test_the_release_has_the_options_of_the_servers(key: str, release: Release) -> None:
    for *_, options in evaluations(key):
        assert "--enable-expert-parallel" in options
        assert release.refuses(options.split()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--enable-elpb"],
        ["--all2all-backend", "deepep"],
        ["--eplb-config.use_asynch=false"],
        ["--eplb-config.communicator=gloo"],
        ["--elpb-config.use_async=false"],
        ["--safetensors-load-strategy", "prefetched"],
        ["--moe-backend", "cutlass_flashinfer"],
        ["--kv-cache-dtype", "fp7"],
    ],
)
def test_other_options_are_refused(options: list[str], release: Release) -> None:
    assert release.refuses(["--enable-eplb", *options]) == options[:1]
