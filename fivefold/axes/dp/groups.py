"""Which ranks sum and divide what: the dense parameters, and those of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fivefold.axes.mesh import DATA, EXPERT_DATA, EXPERT_STATE, STATE, Mesh


@dataclass(frozen=True)
class Groups:
    """`data` all ranks that sum, `shard` those that divide state, `replicate` the copies.

    rank, ranks: this rank among those that divide. copy, copies: its place among the copies.
    """

    data: dist.ProcessGroup | None = None
    shard: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None
    rank: int = 0
    ranks: int = 1
    copy: int = 0
    copies: int = 1


def dense_groups(mesh: Mesh | None) -> Groups:
    """Of parameters that every data rank uses."""
    return Groups() if mesh is None else _groups(mesh, DATA, STATE)


def expert_groups(mesh: Mesh | None) -> Groups:
    """Of experts: the ranks that hold the same ones."""
    return Groups() if mesh is None else _groups(mesh, EXPERT_DATA, EXPERT_STATE)


def _groups(mesh: Mesh, data: tuple[str, ...], state: tuple[str, ...]) -> Groups:
    rank, ranks = mesh.place(state)
    copy, copies = mesh.place(("dp_replicate",))
    return Groups(
        mesh.group(data), mesh.group(state), mesh.group(("dp_replicate",)),
        rank, ranks, copy, copies,
    )  # fmt: skip
