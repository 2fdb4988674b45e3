"""What the compiler calls and does not look into."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache  # one object for all micro-batches, so that nothing is compiled for each
def eager(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`function`, where a compiled block is cut.

    To be called when a backend is made, not as a decorator: it imports the compiler, which takes
    a second that runs without context parallelism need not wait.
    """
    return torch.compiler.disable(function)
