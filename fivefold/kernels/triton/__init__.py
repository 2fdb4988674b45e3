"""Triton kernels for GPUs, one file an operator. Nothing here imports Triton until it is asked."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def is_available() -> bool:
    """Whether the package `triton` is installed (`pip install 'fivefold[gpu]'`)."""
    return importlib.util.find_spec("triton") is not None
