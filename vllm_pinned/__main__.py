# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_pinned`, the same as the command `vllm-pinned`."""

import sys

from vllm_pinned.cli import main

sys.exit(main())
