"""The ranks of a layout as a mesh, and the process groups cut from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout

DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Groups that every layout may need: ranks that differ in these axes and no others.
STATE = ("dp_shard", "cp")  # divide the training state
DATA = ("dp_replicate", "dp_shard", "cp")  # see different tokens with the same parameters
SEQUENCE = ("cp", "tp")  # hold parts of the same sequences
WIDTH = ("dp_replicate", "dp_shard", "cp", "tp")  # hold the same layers
# The dims along which experts are divided and copied are cut from dp_shard x cp x tp.
EXPERT = ("expert",)
EXPERT_STATE = ("expert_shard",)
EXPERT_DATA = ("dp_replicate", "expert_shard")


# Groups of each default group (a process may leave one and enter another) by their rows of ranks.
_MADE: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], ...], Any]] = WeakKeyDictionary()


class Mesh:
    """Ranks by their coordinates. Making one is a collective call: it makes all groups.

    `dense`: rank numbers [pp, dp_replicate, dp_shard, cp, tp]. `sparse`: the same ranks as
    [pp, dp_replicate, expert_shard, expert], where `expert` ranks are neighbours.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout = layout
        self.device_type = device_type
        self.dense = _arrange(layout)
        sparse = self.dense.reshape(layout.pp, layout.dp_replicate, -1, layout.ep)
        self._views = {
            "dense": (DIMS, self.dense),
            "sparse": (("pp", "dp_replicate", "expert_shard", "expert"), sparse),
        }
        self.rank = dist.get_rank()
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
        for axes in (
            *((dim,) for dim in DIMS), STATE, DATA, SEQUENCE, WIDTH, EXPERT, EXPERT_STATE,
            EXPERT_DATA,
        ):  # fmt: skip
            self._groups[axes] = self._make(axes)

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in `axes` alone; None where that is one rank."""
        return self._groups[axes]

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """(index, count) of this rank among those that differ in `axes` alone."""
        row = next(row for row in self.ranks(axes) if self.rank in row)
        return row.index(self.rank), len(row)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        return dict(zip(DIMS, (self.dense == rank).nonzero()[0].tolist(), strict=True))

    def ranks(self, axes: tuple[str, ...]) -> list[list[int]]:
        """All groups of ranks that differ in `axes` alone, in rows.

        A row ascends, as process groups count their ranks, whatever the order of the axes.
        """
        names, ranks = self._view(axes)
        dims = [names.index(axis) for axis in axes]
        others = [dim for dim in range(ranks.ndim) if dim not in dims]
        rows = ranks.permute(*others, *dims).reshape(-1, self._size(axes))
        return rows.sort(-1).values.tolist()

    @cached_property
    def state_mesh(self) -> DeviceMesh:
        """For FSDP: [dp_replicate, dp_shard x cp], without the first where there are no copies."""
        return self._device_mesh("dense", STATE)

    @cached_property
    def expert_state_mesh(self) -> DeviceMesh:
        """The same for experts: [dp_replicate, expert_shard]."""
        return self._device_mesh("sparse", EXPERT_STATE)

    def _device_mesh(self, view: str, shard: tuple[str, ...]) -> DeviceMesh:
        names, ranks = self._views[view]
        dims = [names.index(axis) for axis in ("dp_replicate", *shard)]
        others = [dim for dim in range(ranks.ndim) if dim not in dims]
        shape = (-1, self.layout.dp_replicate, self._size(shard))
        cube = ranks.permute(*others, *dims).reshape(shape).sort(-1).values
        mesh = DeviceMesh(
            self.device_type, cube, mesh_dim_names=("others", "dp_replicate", "shard")
        )
        return mesh["dp_replicate", "shard"] if self.layout.dp_replicate > 1 else mesh["shard"]

    def _view(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], Tensor]:
        return next(v for v in self._views.values() if all(axis in v[0] for axis in axes))

    def _size(self, axes: tuple[str, ...]) -> int:
        names, ranks = self._view(axes)
        return math.prod(ranks.shape[names.index(axis)] for axis in axes)

    def _make(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        return subgroup(self.ranks(axes))


def subgroup(rows: list[list[int]]) -> dist.ProcessGroup | None:
    """The group of this rank's row of ranks; None where rows have one rank.

    A collective call over all rows. Equal rows give the same groups again: groups cost
    connections and are never given back.
    """
    if len(rows[0]) == 1:
        return None
    if len(rows) == 1 and len(rows[0]) == dist.get_world_size():
        return dist.group.WORLD
    made = _MADE.setdefault(dist.group.WORLD, {})
    key = tuple(map(tuple, rows))
    if key not in made:
        made[key], _ = dist.new_subgroups_by_enumeration(rows)
    return made[key]


def _arrange(layout: Layout) -> Tensor:
    """Rank numbers by the coordinates of DIMS, counted in the layout's own order of axes."""
    sizes = [getattr(layout, axis) for axis in layout.order]
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    return ranks.permute([layout.order.index(axis) for axis in DIMS]).contiguous()


def check_rows(layout: Layout, parameters: Mapping[str, Tensor]) -> None:
    """Raise LayoutError if some rank would hold no row of any parameter (divided along dim 0)."""
    ranks = layout.shards
    rows = {name: parameter.shape[0] for name, parameter in parameters.items()}
    # As torch.chunk divides: ceil(rows / ranks) each until there are none left.
    filled = {name: math.ceil(count / math.ceil(count / ranks)) for name, count in rows.items()}
    name = max(filled, key=lambda n: filled[n])
    if filled[name] < ranks:
        raise LayoutError(
            f"layout dp_shard={ranks} leaves ranks without parameters: none divides over more "
            f"than {filled[name]} ({name}, {rows[name]} rows)",
            f"use dp_shard={filled[name]}, and dp_replicate for the other ranks",
        )


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of `layout`; needs a process group.

    Raises LayoutError when the layout does not multiply to the world size.
    """
    layout.check_world(dist.get_world_size())
    return Mesh(layout, device_type)


def alone_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of a process that runs by itself, for what torch builds on meshes only.

    Starts a process group of one rank if there is none: it opens no port.
    """
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return Mesh(layout, device_type)


def all_reduced(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`value` summed over `group`, as a new tensor; itself where there is no group."""
    if group is None:
        return value
    summed = value.clone()
    dist.all_reduce(summed, group=group)
    return summed
