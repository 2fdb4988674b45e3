"""The state of a run at one moment, copied to the host: what this rank will write of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fivefold.axes.part import Part


@dataclass
class TrainState:
    """Everything a run continues from.

    `tensors`: a Part, or a DTensor, where ranks hold parts; plain where every rank holds the same.
    `scalars`: JSON-able, the same on each rank. `rank_tensors`: this rank's alone (generators).
    """

    step: int
    tensors: Mapping[str, Tensor | Part]
    scalars: dict[str, Any] = field(default_factory=dict)
    rank_tensors: dict[str, Tensor] = field(default_factory=dict)


# By name: shape and format (where two ranks hold one tensor, the same), the elements of the whole,
# and how many of them this rank writes.
Outline = dict[str, tuple[str, int, int]]


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a TrainState, on the host and no longer touched by training."""

    step: int
    scalars: bytes  # state.json
    rank_tensors: dict[str, Tensor]
    pieces: dict[MetadataIndex, tuple[WriteItem, Tensor]]  # what this rank writes
    outline: Outline
    nbytes: int  # of the pieces


def take_snapshot(state: TrainState, rank: int, world_size: int, *, copy: bool) -> Snapshot:
    """Copy what this rank writes. `copy=False` keeps views of tensors that are on the host.

    Of values that several ranks hold, one writes: which one, the name alone decides, so that
    ranks that hold different sets of tensors (pipeline stages) agree without asking.
    """
    pieces: dict[MetadataIndex, tuple[WriteItem, Tensor]] = {}
    outline: Outline = {}
    for name, tensor in sorted(state.tensors.items()):
        part = tensor if isinstance(tensor, Part) else Part.of(tensor, rank, world_size)
        place = part.slice
        writes = zlib.crc32(name.encode()) % place.copies == place.copy
        words = f"{tuple(place.whole)} {part.dtype}"
        outline[name] = (words, place.whole.numel(), place.numel if writes else 0)
        if place.numel and writes:
            item = _write_item(name, part)
            pieces[item.index] = (item, _to_host(part.values, copy))
    return Snapshot(
        step=state.step,
        scalars=json.dumps({"step": state.step, "scalars": state.scalars}, indent=1).encode(),
        rank_tensors={name: _to_host(t, True) for name, t in state.rank_tensors.items()},
        pieces=pieces,
        outline=outline,
        nbytes=sum(piece.nbytes for _, piece in pieces.values()),
    )


def _write_item(name: str, part: Part) -> WriteItem:
    """DCP's description of a part: a piece of a tensor at an offset."""
    place = part.slice
    return WriteItem(
        index=MetadataIndex(name, torch.Size(place.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.sizes)),
            properties=TensorProperties(dtype=part.dtype),
            size=place.whole,
        ),
    )


def _to_host(tensor: Tensor, copy: bool) -> Tensor:
    with torch.no_grad():
        return tensor.detach().to("cpu", copy=copy)
