"""Which box of a whole tensor a rank holds: the one description that all axes share.

Tensor, expert and pipeline parallelism cut a parameter once, the data axis cuts rows of what is
left; either way a rank holds a box (an offset and a size per dim) of the whole. Checkpoints, the
gradient norm and the first values of parameters need to know no more than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor, nn

# Known not to be DTensors, whose import takes most of a second, which runs without any do without.
PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class Slice:
    """A box of a whole tensor, without its values.

    copy, copies: which of how many ranks that hold this same box; the gradient norm counts each
    box once, and one of the copies writes it to a checkpoint.
    """

    whole: Size
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copy: int = 0
    copies: int = 1

    @classmethod
    def of(cls, tensor: Tensor) -> Slice:
        """All of a tensor."""
        return cls(tensor.shape, (0,) * tensor.ndim, tuple(tensor.shape))

    def narrow(self, dim: int, start: int, size: int) -> Slice:
        """The part [start, start + size) of this box along `dim`."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = size
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes))

    def copied(self, copy: int, copies: int) -> Slice:
        """One of `copies` times as many holders: the `copy`-th of each holder so far."""
        return replace(self, copy=self.copy * copies + copy, copies=self.copies * copies)

    def cut(self, whole: Tensor) -> Tensor:
        """This box of `whole`, as a view."""
        view = whole
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        return view

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Part:
    """What this rank holds of a tensor: the values, and where in the whole they lie."""

    values: Tensor
    slice: Slice

    @property
    def shape(self) -> Size:
        """Of the whole."""
        return self.slice.whole

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    def like(self, values: Tensor) -> Part:
        """Other values at the same place."""
        return Part(values, self.slice)

    @classmethod
    def of(cls, tensor: Tensor, rank: int = 0, ranks: int = 1) -> Part:
        """A DTensor's local part; a plain tensor, which all `ranks` hold, as a whole."""
        if type(tensor) in PLAIN:
            return cls(tensor.detach(), Slice.of(tensor).copied(rank, ranks))
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), Slice.of(tensor).copied(rank, ranks))
        mesh = tensor.device_mesh
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, mesh, tensor.placements
        )
        slice = Slice(tensor.shape, tuple(offsets), tuple(sizes))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "every rank is part of the mesh of its tensors"
        for axis, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                slice = slice.copied(coordinate[axis], mesh.size(axis))
        return cls(tensor.to_local().detach(), slice)
