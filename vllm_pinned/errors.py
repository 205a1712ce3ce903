# SPDX-License-Identifier: Apache-2.0
"""The one exception that reaches the user, and fitting others into its sentence."""


class BadInput(Exception):
    """What the user gave cannot be used.

    The message is one sentence, or a few lines for drift, that ends in what to do.
    The command prints it and exits with 2, having changed nothing.
    """


def one_line(what: object) -> str:
    """What another program or library says, as part of a sentence."""
    return " ".join(str(what).split())
