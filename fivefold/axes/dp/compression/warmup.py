"""Whole gradients at first: early ones change fast, and a memory would hold stale ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.dp.bucket import Bucket
from fivefold.axes.dp.compression.protocol import MakeCompressor, Rounds


class Warmup:
    """`first` for `steps` steps, then `then`."""

    def __init__(
        self,
        bucket: Bucket,
        group: dist.ProcessGroup,
        *,
        steps: int,
        first: MakeCompressor,
        then: MakeCompressor,
    ) -> None:
        self._first, self._then = first(bucket, group), then(bucket, group)
        self._steps = steps
        self._done = torch.zeros((), dtype=torch.int64)
        self._name = bucket.names[0]

    def reduce(self, flat: Tensor) -> Rounds:
        """As the one whose turn it is."""
        warm = int(self._done) >= self._steps
        self._done += 1
        yield from (self._then if warm else self._first).reduce(flat)

    def state(self) -> dict[str, Tensor]:
        """The count of steps, and what both carry over."""
        return {f"steps/{self._name}": self._done} | self._first.state() | self._then.state()
