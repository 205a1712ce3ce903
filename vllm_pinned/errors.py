# SPDX-License-Identifier: Apache-2.0
"""The one exception that reaches the user."""


class BadInput(Exception):
    """What the user gave cannot be used.

    The message is one sentence, or a few lines for drift, that ends in what to do.
    The command prints it and exits with 2, having changed nothing.
    """
