"""Flat buffers for several parameters at once: few large collectives instead of many small."""

from __future__ import annotations

# R ranks that share, Z elements of one rank's part of a bucket (padded to the largest)
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together.

    The buckets never change during a run. torch's DDP rebuilds its own after the first step, so
    that a ring adds the same numbers in another order, and a resumed run in yet another.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.parameters)

    @property
    def wide(self) -> torch.dtype:
        """What gradients are collected in: fp32, or the parameters' format where that is wider."""
        return torch.promote_types(self.parameters[0].dtype, torch.float32)

    def zeros(self, numel: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros where the parameters lie: a flat gradient [numel] if nothing else is said."""
        size = self.numel if numel is None else numel
        return torch.zeros(size, dtype=dtype or self.wide, device=self.parameters[0].device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` [numel] as one tensor a parameter, one after the other."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def shard_size(self, ranks: int) -> int:
        """Z: elements of the first rank's part, which is the largest."""
        return sum(rows_of(p, 0, ranks) * row_numel(p) for p in self.parameters)

    def shard_views(self, flat: Tensor, rank: int, ranks: int) -> list[Tensor]:
        """One rank's `flat` [Z] as that rank's rows of each parameter."""
        views, offset = [], 0
        for parameter in self.parameters:
            rows = rows_of(parameter, rank, ranks)
            size = rows * row_numel(parameter)
            views.append(flat[offset : offset + size].view(rows, *parameter.shape[1:]))
            offset += size
        return views


def make_buckets(
    parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int, element: int = 4
) -> list[Bucket]:
    """Group parameters, last first (the order in which backward finishes them), to the size."""
    buckets: list[Bucket] = []
    held: list[tuple[str, nn.Parameter]] = []
    held_bytes = 0
    for name, parameter in reversed(parameters):
        held.append((name, parameter))
        held_bytes += parameter.numel() * element
        if held_bytes >= bucket_bytes:
            buckets.append(_bucket(held))
            held, held_bytes = [], 0
    return [*buckets, _bucket(held)] if held else buckets


def rows_of(parameter: Tensor, rank: int, ranks: int) -> int:
    """Rows of dim 0 that `rank` holds, as torch.chunk and DTensor's Shard(0) divide them."""
    each = math.ceil(parameter.shape[0] / ranks)
    return max(0, min(each, parameter.shape[0] - each * rank))


def shard_of(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """The rows of `tensor` that `rank` holds, as a view."""
    each = math.ceil(tensor.shape[0] / ranks)
    start = min(each * rank, tensor.shape[0])
    return tensor[start : start + rows_of(tensor, rank, ranks)]


def row_numel(parameter: Tensor) -> int:
    """Elements of one row."""
    return math.prod(parameter.shape[1:])


def _bucket(held: list[tuple[str, nn.Parameter]]) -> Bucket:
    return Bucket(tuple(n for n, _ in held), tuple(p for _, p in held))
