"""The GPU's operators, in Triton (Tillet et al. 2019); nothing here imports Triton by itself.

Each module holds one operator as plain functions of tensors. Their sums run in an order that the
shapes alone fix: no atomics, no autotuning (which may choose another tile in the next process), no
split that depends on how many rows there are. So results repeat, and a row's bits depend on the row.

Nothing here has run on a GPU yet. The tests run every kernel in Triton's interpreter and compile
each for Hopper (sm_90).
"""

from __future__ import annotations

import importlib.util


def is_available() -> bool:
    """Whether Triton is installed, which the modules of this package need. Imports nothing."""
    found = importlib.util.find_spec("triton")
    # A folder of that name on the path is found too; only a package has an origin.
    return found is not None and found.origin is not None
