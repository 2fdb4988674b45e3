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

    def __init__(
        self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup, *, dtype: torch.dtype
    ) -> None:
        self._flat, self._group, self._dtype = flat, group, dtype

    def reduce(self) -> Rounds:
        """One round."""
        if self._dtype.itemsize >= self._flat.dtype.itemsize:
            yield [dist.all_reduce(self._flat, group=self._group, async_op=True)]
            return
        rounded = self._flat.to(self._dtype)
        yield [dist.all_reduce(rounded, group=self._group, async_op=True)]
        self._flat.copy_(rounded)

    def state(self) -> dict[str, Tensor]:
        """Nothing is carried over: what is rounded away is lost."""
        return {}
