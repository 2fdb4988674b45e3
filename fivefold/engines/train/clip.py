"""Clipping by the global gradient norm (Pascanu et al. 2013)."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.axes.parallel import ParallelModel

EPSILON = 1e-6


def clip_gradients(model: ParallelModel, limit: float | None) -> Tensor:
    """Scale the gradients in place to a global L2 norm of at most `limit`; returns the norm before.

    Each element counts once, whatever the axes: squares are added over all ranks, and one that n
    ranks hold copies of counts an n-th on each. Accumulated in fp64, so that the order of the
    parts does not show.
    """
    masters = model.masters()
    held = {name: g for name, g in model.gradients().items() if g.numel()}
    gradients = list(held.values())
    norms = torch._foreach_norm(gradients) if gradients else []
    device = gradients[0].device if gradients else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for name, norm in zip(held, norms, strict=True):
        squares += norm.double().square() / masters[name].slice.copies
    total = model.sum(squares).sqrt()
    if limit is not None and gradients:
        factor = (limit / (total + EPSILON)).clamp(max=1.0).to(gradients[0].dtype)
        torch._foreach_mul_(gradients, factor)
    return total
