"""Parameters that several stages hold: their gradients are summed, and every copy gets the same bits.

A schedule in two directions holds every part of the model twice; a tied embedding is on the first and
on the last stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.pp.schedule import Schedule


def copy_of(schedule: Schedule, stage: int) -> int | None:
    """The stage that computes the same part in the other direction, if the schedule has one."""
    if schedule.directions == 1:
        return None
    return (stage + schedule.stages) % (2 * schedule.stages)


def sum_copies(
    schedule: Schedule,
    rank: int,
    group: dist.ProcessGroup | None,
    gradients: Mapping[int, Sequence[Tensor]],
) -> None:
    """Add to each gradient that of the other direction's copy, in place.

    `gradients` by stage, in the same order on both copies. Nothing happens in one direction.
    """
    parts: list[tuple[int, Sequence[Tensor]]] = []
    # Both ranks of a pair name the parts in the same order.
    for stage in sorted(schedule.held(rank), key=schedule.part):
        other = copy_of(schedule, stage)
        if other is not None:
            parts.append((schedule.placement[other], gradients[stage]))
    if parts:
        add_from_peers(parts, group)


@torch.no_grad()
def add_from_peers(
    parts: Sequence[tuple[int, Sequence[Tensor]]], group: dist.ProcessGroup | None
) -> None:
    """Exchange tensors with ranks of `group` and add what comes, in place: `(peer, tensors)`.

    Two ranks that exchange name the same tensors in the same order (NCCL knows no tags). One message
    each way a tensor, and as much memory again.
    """
    operations: list[dist.P2POp] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    named: Counter[int] = Counter()  # tensors by peer
    for peer, tensors in parts:
        for tensor in tensors:
            theirs = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            peers: dict[str, Any] = {"group": group, "tag": named[peer], "group_peer": peer}
            operations.append(dist.P2POp(dist.isend, tensor.contiguous(), **peers))
            operations.append(dist.P2POp(dist.irecv, theirs, **peers))
            pairs.append((tensor, theirs))
            named[peer] += 1
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for tensor, theirs in pairs:
        tensor += theirs
