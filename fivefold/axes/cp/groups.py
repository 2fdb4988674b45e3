"""The two process groups of a context rank, cut from the mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | None


def context_groups(mesh: DeviceMesh, ulysses: int) -> tuple[Group, Group]:
    """(ring group, Ulysses group) of this rank; None where that is one rank.

    `mesh` has a dim `cp`. Neighbours along it, `ulysses` at a time, share out heads: theirs is
    the heavier traffic for one layer, and neighbours have the faster links. Every rank of the
    mesh must call this, once.
    """
    assert mesh.mesh_dim_names is not None
    dim = mesh.mesh_dim_names.index("cp")
    ways = mesh.size(dim)
    if ways == 1:
        return None, None
    if ulysses == 1:
        return mesh.get_group("cp"), None
    if ulysses == ways:
        return None, mesh.get_group("cp")
    rows = mesh.mesh.movedim(dim, -1).reshape(-1, ways // ulysses, ulysses)
    ring = _mine(rows.transpose(1, 2).flatten(0, 1).tolist())
    return ring, _mine(rows.flatten(0, 1).tolist())


def _mine(groups: Sequence[list[int]]) -> Group:
    """Make all `groups`, which every rank has to; the one with this rank."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
