"""What the reducer asks of a compressor: the sum of one bucket's gradient, exact or nearly so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from fivefold.axes.dp.bucket import Bucket

# The collectives of one round; the reducer waits for them and asks for the next round.
Rounds = Iterator[list[dist.Work]]


class Compressor(Protocol):
    """Of one bucket and a group of ranks, for the length of a run."""

    def reduce(self, flat: Tensor) -> Rounds:
        """Sum the bucket's flat gradient over the group, in place, in rounds of communication.

        A round ends where results are needed: other buckets' rounds and backward go on
        meanwhile. Every rank has equally many rounds, so that ranks agree on the order of
        collectives. What comes out is the same on every rank, bit for bit.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on: the tensors themselves, to be saved or filled.

        Each rank has its own values. Names tell buckets and parameters apart.
        """
        ...


MakeCompressor = Callable[[Bucket, dist.ProcessGroup], Compressor]
