# SPDX-License-Identifier: Apache-2.0
"""Put this fork's edits into a vLLM: a wheel, an installation or a checkout."""

# The number of this set of edits, N in the version X.Y.Z+pinned.N of a wheel.
# Raise it whenever an edit changes.
__version__ = "6"
