"""The state of a run at one moment, copied to the host: what this rank will write of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor


@dataclass
class TrainState:
    """Everything a run continues from.

    `tensors`: DTensor where ranks hold parts, plain where every rank holds the same values.
    `scalars`: JSON-able, the same on each rank. `rank_tensors`: this rank's alone (generators).
    """

    step: int
    tensors: dict[str, Tensor]
    scalars: dict[str, Any] = field(default_factory=dict)
    rank_tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a TrainState, on the host and no longer touched by training."""

    step: int
    scalars: bytes  # state.json
    rank_tensors: dict[str, Tensor]
    pieces: dict[MetadataIndex, tuple[WriteItem, Tensor]]  # what this rank writes
    outline: str  # hash of names, shapes and placements: the same on each rank
    nbytes: int  # of the pieces


def take_snapshot(state: TrainState, rank: int, world_size: int, *, copy: bool) -> Snapshot:
    """Copy what this rank writes. `copy=False` keeps views of tensors that are on the host.

    Values that several ranks hold are divided among them, so that n replicas stage and write an
    n-th each. Every rank works out the same division from names, shapes and placements.
    """
    shares: dict[int, list[int]] = {}
    pieces: dict[MetadataIndex, tuple[WriteItem, Tensor]] = {}
    outline = hashlib.sha256()
    for name, tensor in sorted(state.tensors.items()):
        replica, replicas = _replica(tensor, rank, world_size)
        outline.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {replicas}\n".encode())
        loads = shares.setdefault(replicas, [0] * replicas)
        writer = loads.index(min(loads))
        loads[writer] += tensor.numel()
        if writer == replica:
            for item in _create_write_items(name, tensor):
                pieces[item.index] = (item, _to_host(_local(tensor), copy))
    return Snapshot(
        step=state.step,
        scalars=json.dumps({"step": state.step, "scalars": state.scalars}, indent=1).encode(),
        rank_tensors={name: _to_host(t, True) for name, t in state.rank_tensors.items()},
        pieces=pieces,
        outline=outline.hexdigest(),
        nbytes=sum(piece.nbytes for _, piece in pieces.values()),
    )


def _replica(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """Which copy of the values this rank has, of how many."""
    if not isinstance(tensor, DTensor):
        return rank, world_size
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is part of the mesh of its tensors"
    replica, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            ways = tensor.device_mesh.size(axis)
            replica, replicas = replica * ways + coordinate[axis], replicas * ways
    return replica, replicas


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _to_host(tensor: Tensor, copy: bool) -> Tensor:
    with torch.no_grad():
        return tensor.detach().to("cpu", copy=copy)
