"""The device mesh of a layout, and the process groups cut from it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout

# Outermost first: ranks that differ in the last axis are neighbours.
DATA_AXES = ("dp_replicate", "dp_shard")
NOT_BUILT = ("tp", "pp", "cp", "ep")


def check_layout(layout: Layout) -> None:
    """Raise LayoutError for axes and combinations that this version does not run."""
    for axis in NOT_BUILT:
        if getattr(layout, axis) > 1:
            raise LayoutError(
                f"layout {axis}={getattr(layout, axis)}: this axis is not built yet",
                "use dp_replicate and dp_shard",
            )
    if layout.offload == "parameters" and layout.zero != 3:
        raise LayoutError(
            f"layout zero={layout.zero} keeps whole parameters where they compute, "
            "which offload=parameters takes away",
            "use zero=3, or offload=optimizer",
        )


def check_rows(layout: Layout, parameters: Mapping[str, Tensor]) -> None:
    """Raise LayoutError if some rank would hold no row of any parameter (divided along dim 0)."""
    ranks = layout.dp_shard
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


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """A mesh with the dims `dp_replicate` and `dp_shard`; needs a process group.

    Raises LayoutError when the layout does not multiply to the world size.
    """
    check_layout(layout)
    layout.check_world(dist.get_world_size())
    shape = tuple(getattr(layout, axis) for axis in DATA_AXES)
    return init_device_mesh(device_type, shape, mesh_dim_names=DATA_AXES)


def alone_mesh(device_type: str) -> DeviceMesh:
    """The mesh of a process that runs by itself, for what torch builds on meshes only.

    Starts a process group of one rank if there is none: it opens no port.
    """
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device_type, (1, 1), mesh_dim_names=DATA_AXES)


def group_of(mesh: DeviceMesh | None, axis: str) -> dist.ProcessGroup | None:
    """The group of ranks along `axis`; None where that is one rank."""
    if mesh is None or mesh[axis].size() == 1:
        return None
    return mesh.get_group(axis)


def data_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group of all ranks that read different data; None for one rank."""
    if mesh is None or mesh.size() == 1:
        return None
    return dist.group.WORLD  # both of its dims are data axes


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that sharded tensors live on: with the replicating dim only if there are copies."""
    return mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]


def all_reduced(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`value` summed over `group`, as a new tensor; itself where there is no group."""
    if group is None:
        return value
    summed = value.clone()
    dist.all_reduce(summed, group=group)
    return summed
