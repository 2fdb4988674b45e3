"""Factors of low rank instead of matrices: PowerSGD (Vogels, Karimireddy and Jaggi 2019).

Of the sum M of all ranks' matrices (each with what it could not send before) one step of subspace
iteration is done, from where the last step ended:

    P = M Q        summed over ranks, then made orthonormal
    Q = Mᵀ P       summed over ranks, and kept for the next step
    M ~ P Qᵀ

Both products are linear in M, so ranks multiply their own matrices and sum the factors: the result
is that of one process that has M.
"""

from __future__ import annotations

# n x m a matrix, r the rank; stacked experts [X,n,m] are X matrices
import math
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.dp.bucket import Bucket
from fivefold.axes.dp.compression.protocol import Rounds


def is_worth(shape: Sequence[int], rank: int) -> bool:
    """Whether factors of `rank` have fewer elements than the matrix; vectors never do."""
    if len(shape) < 2:
        return False
    rows, columns = shape[-2:]
    return rank * (rows + columns) < rows * columns


class PowerSGD:
    """Rank-`rank` approximations of a bucket's matrices; vectors and small matrices as they are.

    memory: of each matrix, what this rank computed and did not get across (error feedback). It is
    the rank's own rest, M - P Pᵀ M, and not M less the sum's approximation as in the paper's code:
    both add up to the same over ranks, which is all that counts, but this one is zero when
    nothing was lost.
    """

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, *, rank: int) -> None:
        self._group = group
        self._bucket = bucket
        named = zip(bucket.names, bucket.parameters, strict=True)
        matrices = {name: p.shape for name, p in named if is_worth(p.shape, rank)}
        self._memory = {n: bucket.zeros(s.numel()).view(s) for n, s in matrices.items()}
        shapes = list(matrices.values())
        # All factors of a bucket lie in two buffers: one message each.
        self._left = bucket.zeros(sum(math.prod(s[:-1]) * rank for s in shapes))
        self._right = bucket.zeros(sum(s.numel() // s[-2] * rank for s in shapes))
        self._lefts = _views(self._left, [(*s[:-1], rank) for s in shapes])
        self._rights = _views(self._right, [(*s[:-2], s[-1], rank) for s in shapes])
        for name, right in zip(self._memory, self._rights, strict=True):
            right.copy_(_first(name, right.shape))

    def reduce(self, flat: Tensor) -> Rounds:
        """Two rounds: left factors and what is not compressed; right factors."""
        named = dict(zip(self._bucket.names, self._bucket.views(flat), strict=True))
        gradients = [g for name, g in named.items() if name not in self._memory]
        matrices = [named[name] for name in self._memory]
        each = list(zip(matrices, self._lefts, self._rights, strict=True))
        for matrix, memory in zip(matrices, self._memory.values(), strict=True):
            matrix += memory
        for matrix, left, right in each:
            torch.matmul(matrix, right, out=left)
        plain = torch.cat([g.reshape(-1) for g in gradients]) if gradients else self._left[:0]
        yield [self._sum(message) for message in (self._left, plain) if message.numel()]
        parts = plain.split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        if not matrices:
            return
        for memory, (matrix, left, right) in zip(self._memory.values(), each, strict=True):
            left.copy_(torch.linalg.qr(left).Q)
            torch.matmul(matrix.mT, left, out=right)
            torch.sub(matrix, left @ right.mT, out=memory)
        yield [self._sum(self._right)]
        for matrix, left, right in each:
            torch.matmul(left, right.mT, out=matrix)

    def state(self) -> dict[str, Tensor]:
        """Memories, and the factors that the next step starts from."""
        memories = {f"memory/{name}": memory for name, memory in self._memory.items()}
        factors = zip(self._memory, self._rights, strict=True)
        return memories | {f"right/{name}": right for name, right in factors}

    def _sum(self, message: Tensor) -> dist.Work:
        return dist.all_reduce(message, group=self._group, async_op=True)


def _first(name: str, shape: torch.Size) -> Tensor:
    """Where the iteration starts: normal numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def _views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
