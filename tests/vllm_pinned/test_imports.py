# SPDX-License-Identifier: Apache-2.0
"""Adding an import: where it goes, and that nothing else moves."""

import subprocess
import sys

import pytest

from vllm_pinned.imports import add_import

LINE = "from vllm.utils.torch_utils import PIN_MEMORY"
PATH = "vllm/v1/worker/runner.py"

CASES = {
    "there already": (f"{LINE}\n", f"{LINE}\n"),
    "there already, relative": (
        "from ...utils.torch_utils import PIN_MEMORY\n",
        "from ...utils.torch_utils import PIN_MEMORY\n",
    ),
    "a relative one of another module": (
        "from vllm.logger import x\n\nfrom ..utils.torch_utils import PIN_MEMORY\n",
        f"from vllm.logger import x\n{LINE}\n\n"
        "from ..utils.torch_utils import PIN_MEMORY\n",
    ),
    "one line": (
        "from vllm.utils.torch_utils import a, b\n",
        "from vllm.utils.torch_utils import PIN_MEMORY, a, b\n",
    ),
    "after a constant": (
        "from vllm.utils.torch_utils import AAA, b  # why\n",
        "from vllm.utils.torch_utils import AAA, PIN_MEMORY, b  # why\n",
    ),
    "last of all": (
        "from vllm.utils.torch_utils import AAA\n",
        "from vllm.utils.torch_utils import AAA, PIN_MEMORY\n",
    ),
    "too long for one line": (
        "from vllm.utils.torch_utils import is_quantized_kv_cache, np_to_pinned_tensor\n",
        "from vllm.utils.torch_utils import (\n    PIN_MEMORY,\n"
        "    is_quantized_kv_cache,\n    np_to_pinned_tensor,\n)\n",
    ),
    "one name a line": (
        "from vllm.utils.torch_utils import (\n    LayerNameType,  # a type\n    b,\n)\n",
        "from vllm.utils.torch_utils import (\n    PIN_MEMORY,\n"
        "    LayerNameType,  # a type\n    b,\n)\n",
    ),
    "one name a line, last": (
        "from vllm.utils.torch_utils import (\n    AAA,\n    BBB,\n)\n",
        "from vllm.utils.torch_utils import (\n    AAA,\n    BBB,\n    PIN_MEMORY,\n)\n",
    ),
    "between modules": (
        "import torch\n\nfrom vllm.logger import x\nfrom vllm.v1.y import z\n",
        f"import torch\n\nfrom vllm.logger import x\n{LINE}\nfrom vllm.v1.y import z\n",
    ),
    "before the first": (
        "import torch\n\nfrom vllm.v1.y import z\n",
        f"import torch\n\n{LINE}\nfrom vllm.v1.y import z\n",
    ),
    "no section yet": ("import torch\n", f"import torch\n\n{LINE}\n"),
    "only a docstring": ('"""Text."""\n', f'"""Text."""\n\n{LINE}\n'),
    "nothing": ("x = 1\n", f"{LINE}\nx = 1\n"),
    "late imports are left alone": (
        "from vllm.logger import x\n\n\ndef f():\n    pass\n\n\nfrom vllm.utils import y\n",
        f"from vllm.logger import x\n{LINE}\n\n\ndef f():\n    pass\n\n\n"
        "from vllm.utils import y\n",
    ),
}


@pytest.mark.parametrize(("before", "after"), CASES.values(), ids=CASES)
def test_add_import(before: str, after: str) -> None:
    assert add_import(before.encode(), LINE, PATH).decode() == after
    assert add_import(after.encode(), LINE, PATH).decode() == after


# No blank line is added before code that follows at once.
SORTED = sorted(set(CASES) - {"nothing"})


@pytest.mark.parametrize("name", SORTED)
def test_ruff_agrees_with_the_order(name: str) -> None:
    _, after = CASES[name]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "check", "--isolated", "--select=I"),
            "--config=lint.isort.known-first-party=['vllm']",
            *("--stdin-filename=x.py", "-"),
        ],
        input=after.encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()


def test_carriage_returns() -> None:
    before = b"from vllm.utils.torch_utils import (\r\n    b,\r\n)\r\n"
    after = (
        b"from vllm.utils.torch_utils import (\r\n    PIN_MEMORY,\r\n    b,\r\n)\r\n"
    )
    assert add_import(before, LINE, PATH) == after
