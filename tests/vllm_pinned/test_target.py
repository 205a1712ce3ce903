# SPDX-License-Identifier: Apache-2.0
"""What a target is: installed, editable, folders, wheels and releases."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm_pinned.conftest import Run
from vllm_pinned.target import resolve


def test_the_installed_vllm(tree: Callable[[str], Path], run: Run) -> None:
    """Found beside the command as its Python finds packages, and not imported."""
    root = tree("0.29.0")
    (root / "vllm/__init__.py").write_text("raise SystemExit('imported')\n")
    path = {"PYTHONPATH": str(root)}
    before = run("status", env=path)
    assert before.returncode == 1, before.stderr
    assert f"vllm 0.29.0 in {root} (installed)" in before.stdout
    assert "not patched: needs eplb-gloo-receive-staging, " in before.stdout
    assert run("apply", env=path).returncode == 0
    after = run("status", env=path)
    assert after.returncode == 0
    assert "patched (vllm-pinned applied " in after.stdout.splitlines()[-1]
    assert run("revert", env=path).returncode == 0
    assert run("status", env=path).stdout == before.stdout


def test_an_editable_installation(
    tree: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    """The checkout that it runs from is the target."""
    root, site = tree("0.33.0"), tmp_path / "site with space"
    info = site / "vllm-0.33.0.dist-info"
    site.mkdir()
    (root / info.name).rename(info)
    origin = {"url": root.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    done = run("status", env={"PYTHONPATH": str(site)})
    assert done.returncode == 1, done.stderr
    assert f"vllm in {root} (installed)" in done.stdout


@pytest.mark.parametrize("below", ["", "vllm"])
def test_a_folder(tree: Callable[[str], Path], below: str) -> None:
    root = tree("0.33.0")
    target = resolve(str(root / below))
    assert (target.path, target.version) == (root, "0.33.0")
    assert target.dist_info == "vllm-0.33.0.dist-info"


def test_json(tree: Callable[[str], Path], run: Run) -> None:
    root = tree("0.33.0")
    done = run("status", root, "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["target"] == str(root)
    needed = [edit for edit in said["edits"] if edit["state"] == "needed"]
    names = ", ".join(edit["id"] for edit in needed)
    assert said["verdict"] == f"not patched: needs {names}"
    assert said["applied"] == []
    states = {edit["id"]: edit["state"] for edit in said["edits"]}
    assert states["sm90-sparse-mla-plan"] == "needed"
    assert states["eplb-gloo-receive-staging"] == "present"
    (plan,) = (edit for edit in needed if edit["id"] == "sm90-sparse-mla-plan")
    assert (
        plan["file"] == "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
    )
    assert all(edit["line"] > 1 for edit in needed)
