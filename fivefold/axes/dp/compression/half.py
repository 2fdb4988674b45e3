"""The whole gradient in fp16, at a scale that uses its narrow range."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.dp.bucket import Bucket
from fivefold.axes.dp.compression.protocol import Rounds

LARGEST = torch.finfo(torch.float16).max


class Half:
    """All-reduce in fp16 of the gradient times a power of two, the same on every rank.

    fp16 has 11 bits (bf16 8) but ends at 65504, and below 6e-8 everything is zero. The ranks first
    agree on the largest element, by a maximum of one number, and scale so that their sum cannot
    overflow. A gradient with an infinity or a NaN anywhere comes out as NaN.
    """

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)

    def reduce(self, flat: Tensor) -> Rounds:
        """Two rounds: the largest element, the gradient."""
        largest = flat.abs().amax()
        # A maximum may drop a NaN, which an infinity does not let it.
        largest = torch.where(largest.isfinite(), largest, torch.inf)
        yield [dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)]
        room = (LARGEST / (self._ranks * largest)).clamp(2.0**-100, 2.0**100)
        # A rank's element rounds up by 2^-11 at most: half of the room is more than enough.
        scale = torch.where(largest.isfinite(), (room.log2().floor() - 1).exp2(), torch.nan)
        rounded = (flat * scale).half()
        yield [dist.all_reduce(rounded, group=self._group, async_op=True)]
        flat.copy_(rounded).div_(scale)

    def state(self) -> dict[str, Tensor]:
        """Nothing is carried over: what is rounded away is lost."""
        return {}
