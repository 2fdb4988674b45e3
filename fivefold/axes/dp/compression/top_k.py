"""The largest elements instead of all (Stich, Cordonnier and Jaggi 2018; Lin et al. 2018).

Each rank sends the elements of a bucket that are largest in magnitude, and adds the others to its next
gradient. Ranks choose different places, so what they send is gathered and not reduced: it grows with
the number of ranks, and the sum has up to that many times as many elements that are not zero.
"""

from __future__ import annotations

# N elements of a bucket, k of them sent, R ranks
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.dp.bucket import Bucket
from fivefold.axes.dp.compression.protocol import Rounds

# Places travel in the same message as values, as integers of the same size.
PLACES = {torch.float32: torch.int32, torch.float64: torch.int64}


class TopK:
    """The share `ratio` of a bucket's elements (at least one).

    memory [N]: what this rank computed and has not sent yet (error feedback). The momentum
    correction of deep gradient compression is for SGD: AdamW's moments are of what arrives.
    """

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, *, ratio: float) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._count = max(1, round(ratio * bucket.numel))
        self._memory = bucket.zeros()
        self._name = bucket.names[0]

    def reduce(self, flat: Tensor) -> Rounds:
        """One round: everybody's places and values."""
        whole, count = PLACES[flat.dtype], self._count
        self._memory += flat
        places = self._memory.abs().topk(count, sorted=False).indices
        message = torch.cat((self._memory[places].view(whole), places.to(whole)))
        self._memory.index_fill_(0, places, 0.0)
        everyone = message.new_empty(self._ranks * len(message))
        yield [dist.all_gather_single(everyone, message, group=self._group, async_op=True)]
        values, places = everyone.view(self._ranks, 2, count).unbind(1)
        # In the order of ranks, so that all ranks add alike.
        flat.zero_()
        flat.index_add_(0, places.flatten(), values.flatten().view(flat.dtype))

    def state(self) -> dict[str, Tensor]:
        """The memory, under the name of the bucket's first parameter."""
        return {f"memory/{self._name}": self._memory}
