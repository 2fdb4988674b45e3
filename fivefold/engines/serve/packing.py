"""Several projections of one input as one matrix, without holding the weights twice."""

# O outputs, I inputs

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.model.projection import Projection


@torch.no_grad()
def pack(*projections: Projection) -> tuple[Tensor, Tensor | None]:
    """(weight [sum of O, I], bias or None); the projections' parameters become views of these.

    Projections that were packed before are found so and shared.
    """
    weight = _pack([p.weight for p in projections])
    biases = [p.bias for p in projections if p.bias is not None]
    return weight, _pack(biases) if biases else None


def _pack(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0].data
    if len(parameters) == 1:
        return first
    rows = [p.shape[0] for p in parameters]
    if _adjacent(parameters):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    packed = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, packed.split(rows), strict=True):
        parameter.data = part
    return packed


def _adjacent(parameters: Sequence[Tensor]) -> bool:
    """Whether each parameter begins where the one before ends, in one storage."""
    storage = parameters[0].untyped_storage().data_ptr()
    end = parameters[0].data_ptr()
    for p in parameters:
        if p.untyped_storage().data_ptr() != storage or p.data_ptr() != end:
            return False
        if not p.is_contiguous():
            return False
        end += p.numel() * p.element_size()
    return True
