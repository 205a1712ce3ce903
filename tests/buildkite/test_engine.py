# SPDX-License-Identifier: Apache-2.0
"""engine.sh, on stand-ins for the released and the patched vLLM."""

import json
import shutil
from pathlib import Path

import pytest

from tests.buildkite.conftest import PATCHED, RELEASED, ROOT, Job, write_wheel

# Stands in for tests/engine/run.py: says which trees it got, and ends as it is told.
SCRIPT = """\
import json, sys
from importlib.metadata import distributions
from pathlib import Path

*trees, mode, scenario, option, file = sys.argv[1:]
assert option == "--json"
versions = [
    found.version
    for tree in trees
    for found in distributions(name="vllm", path=[tree])
    if (Path(tree) / "vllm/__init__.py").is_file()
]
Path(file).write_text(json.dumps([versions, mode, scenario]))
print("a table")
sys.exit({code})
"""


@pytest.fixture
def offline(installed: Job, tmp_path: Path) -> Job:
    """An agent whose index has the released wheel, and the patched one, too."""
    for version in (RELEASED, PATCHED):
        write_wheel(tmp_path, version)
    installed.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    (installed.folder / "tests/engine").mkdir(parents=True)
    return installed


@pytest.mark.parametrize("code", [0, 1])
def test_it_compares_the_released_wheel_with_the_built_one(
    offline: Job, code: int
) -> None:
    script = offline.folder / "tests/engine/run.py"
    script.write_text(SCRIPT.format(code=code))
    done = offline.run(".buildkite/engine.sh", "--race-check", "moe")
    assert (done.returncode, done.stdout) == (code, "a table\n"), done.stderr
    build = offline.folder / "build"
    assert (build / "engine.log").read_text() == "a table\n"
    assert json.loads((build / "engine.json").read_text()) == [
        [RELEASED, PATCHED],
        "--race-check",
        "moe",
    ]


def test_it_fails_where_no_engine_starts(offline: Job) -> None:
    """With the real script, and a vLLM that has no engine: two trees that are alike."""
    shutil.copytree(
        ROOT / "tests/engine", offline.folder / "tests/engine", dirs_exist_ok=True
    )
    done = offline.run(".buildkite/engine.sh", "mla-dense")
    assert done.returncode == 1
    assert done.stderr == "engine.sh: an engine cannot start here, see above\n"
    assert "cannot start: cannot import name 'LLM'" in done.stdout
    assert "1 scenarios; 0 complaints" in done.stdout
    assert "mla-dense" in (offline.folder / "build/engine.json").read_text()


def test_it_fails_without_the_released_wheel(offline: Job, tmp_path: Path) -> None:
    (tmp_path / f"vllm-{RELEASED}-py3-none-any.whl").unlink()
    script = offline.folder / "tests/engine/run.py"
    script.write_text(SCRIPT.format(code=0))
    done = offline.run(".buildkite/engine.sh", "moe")
    assert done.returncode == 1
    assert f"vllm==={RELEASED}" in done.stderr
    assert not (offline.folder / "build").exists()
