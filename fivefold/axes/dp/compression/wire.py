"""The whole gradient, as it is or rounded to a narrower format."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.dp.bucket import Bucket
from fivefold.axes.dp.compression.protocol import Rounds


class Wire:
    """All-reduce in `dtype`, or in the gradient's own format where that is no wider.

    bf16 has fp32's range, so nothing overflows; each addition on the way rounds to 8 bits.
    """

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, *, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype

    def reduce(self, flat: Tensor) -> Rounds:
        """One round."""
        if self._dtype.itemsize >= flat.dtype.itemsize:
            yield [dist.all_reduce(flat, group=self._group, async_op=True)]
            return
        rounded = flat.to(self._dtype)
        yield [dist.all_reduce(rounded, group=self._group, async_op=True)]
        flat.copy_(rounded)

    def state(self) -> dict[str, Tensor]:
        """Nothing is carried over: what is rounded away is lost."""
        return {}
