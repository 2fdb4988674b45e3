"""Clipping by the global gradient norm (Pascanu et al. 2013)."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.axes.dp.protocol import DataAxis

EPSILON = 1e-6


def clip_gradients(axis: DataAxis, limit: float | None) -> Tensor:
    """Scale the gradients in place to a global L2 norm of at most `limit`; returns the norm before.

    Each element counts once: sums of squares are added over the ranks that hold different parts,
    not over copies. Accumulated in fp64, so that the order of the parts does not show.
    """
    gradients = [g for g in axis.gradients().values() if g.numel()]
    norms = torch._foreach_norm(gradients) if gradients else []
    device = gradients[0].device if gradients else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for norm in norms:
        squares += norm.double().square()
    total = axis.sum_shards(squares).sqrt()
    if limit is not None and gradients:
        factor = (limit / (total + EPSILON)).clamp(max=1.0).to(torch.float32)
        torch._foreach_mul_(gradients, factor)
    return total
