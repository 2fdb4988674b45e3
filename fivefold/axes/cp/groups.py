"""The two process groups of a context rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fivefold.axes.mesh import subgroup

Group = dist.ProcessGroup | None


def context_groups(rows: Sequence[Sequence[int]], ulysses: int) -> tuple[Group, Group]:
    """(ring group, Ulysses group) of this rank; None where that is one rank.

    `rows`: the ranks of every context group (`Mesh.ranks(("cp",))`). Neighbours in a row, `ulysses`
    at a time, share out heads: no computation hides their messages, and neighbours have the
    faster links. A collective call.
    """
    sharing = [
        list(row[start : start + ulysses]) for row in rows for start in range(0, len(row), ulysses)
    ]
    ways = len(rows[0]) // ulysses
    rings = [
        [sharing[start + hop][which] for hop in range(ways)]
        for start in range(0, len(sharing), ways)
        for which in range(ulysses)
    ]
    return subgroup(rings), subgroup(sharing)
