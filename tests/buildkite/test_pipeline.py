# SPDX-License-Identifier: Apache-2.0
"""The pipeline: Buildkite's schema, what every step has, and which jobs there are."""

import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.buildkite.conftest import ROOT

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
    for script in ("accuracy.sh", "regressions.sh"):
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
    assert select("README.md", "tests/vllm_pinned/test_wheel.py") == always
    assert select("tests/v1/attention/test_mla_context_lens.py") == always | regressions
    assert select("tests/distributed/test_eplb_gloo_staging.py") == always | {
        "eplb-execution"
    }
    backend = "vllm/v1/attention/backends/flashinfer.yml"
    assert select(backend) == always | accuracies | regressions
    for path in (
        "vllm/distributed/eplb/eplb_communicator.yml",
        "vllm_pinned/wheel.py",
        "Makefile",
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
