"""Tensors of which each rank holds some rows, described as DTensors so that any layout reads them."""

from __future__ import annotations

from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fivefold.axes.mesh import shard_mesh


def rows_as_dtensor(rows: Tensor, whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's `rows` of a tensor shaped like `whole`, as DTensor(Shard(0)) over `dp_shard`."""
    target = shard_mesh(mesh)
    placements: tuple[Placement, ...] = (Shard(0),)
    if target.ndim == 2:
        placements = (Replicate(), Shard(0))
    return _dtensor(rows, target, placements, whole.shape, whole.stride())


def like(values: Tensor, master: Tensor) -> Tensor:
    """`values`, this rank's part of a tensor divided as `master` is, in the same description."""
    if not isinstance(master, DTensor):
        return values
    return _dtensor(
        values, master.device_mesh, master.placements, master.shape, master.stride()
    )  # fmt: skip


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor or plain tensor, outside autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _dtensor(
    values: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Size,
    stride: tuple[int, ...],
) -> DTensor:
    """As FSDP2 makes its own: DTensor.from_local would move offloaded rows to the mesh's device."""
    meta = TensorMeta(shape, stride, values.dtype)
    return DTensor(values, DTensorSpec(mesh, placements, meta), requires_grad=False)
