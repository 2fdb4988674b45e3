"""Reading what `torch.distributed.checkpoint` (DCP) wrote, without running anything it says.

DCP describes its files in `.metadata`, a pickle. A pickle may name any function of any module;
this one is read by an unpickler that knows the few data classes of DCP and nothing else, and what
comes out is checked against the folder before a byte of it is used.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.serialization import _get_layout

from fivefold.axes.part import Part
from fivefold.core.errors import CheckpointError
from fivefold.weights.checkpoint_manifest import METADATA, Manifest, other_choice

# DCP warns whenever it runs without a process group, which here is a plain way to use it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        dcp.Metadata,
        dcp.TensorStorageMetadata,
        dcp.TensorProperties,
        dcp.ChunkStorageMetadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp._MEM_FORMAT_ENCODING,
        _StorageInfo,
    )
} | {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): _get_layout}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _DataUnpickler(pickle.Unpickler):
    """Knows DCP's data classes, torch.Size and dtypes; refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise CheckpointError(
                f"it names {module}.{name}, which is no part of a checkpoint (nothing was run)"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError("it refers to something outside itself (nothing was run)")


class MetadataReader(FileSystemReader):
    """DCP's reader, given metadata that was read and checked here instead of unpickling it."""

    def __init__(self, folder: Path, metadata: dcp.Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> dcp.Metadata:  # type: ignore[override]
        """What was handed in. Without arguments DCP knows of no other metadata to fall back on."""
        return self._metadata


def read_metadata(folder: Path, manifest: Manifest) -> dcp.Metadata:
    """The tensors of a checkpoint and where their pieces lie.

    Raises CheckpointError when `.metadata` is not readable, names anything but DCP's data
    classes, or describes pieces that the files or tensors cannot hold.
    """
    path = folder / METADATA
    try:
        metadata = _DataUnpickler(BytesIO(path.read_bytes())).load()
        _check(metadata, manifest)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} was refused: {error.message}",
            "do not use this folder: fivefold did not write it like this",
        ) from None
    except Exception as error:  # a broken pickle may raise anything
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error})", "use another checkpoint"
        ) from None
    return metadata


def tensors_of(metadata: dcp.Metadata) -> dict[str, dcp.TensorStorageMetadata]:
    """Name to shape, dtype and pieces, of metadata that `read_metadata` checked."""
    return cast(dict[str, dcp.TensorStorageMetadata], metadata.state_dict_metadata)


class _PartsPlanner(LoadPlanner):
    """Reads into parts of tensors, wherever the pieces in the files begin and end."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts

    def set_up_planner(
        self, state_dict: Any, metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, part in self._parts.items():
            place = part.slice
            if place.numel:
                chunk = dcp.ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.sizes))
                stored = self._metadata.state_dict_metadata[name]
                items += create_read_items_for_chunk_list(name, stored, [chunk])  # type: ignore[arg-type]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise CheckpointError("it holds something that is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._parts[read_item.dest_index.fqn]
        return narrow_tensor_by_index(part.values, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the reader wrote into the part's own memory."""


def load_into(
    tensors: Mapping[str, Tensor | Part],
    folder: Path,
    metadata: dcp.Metadata,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill `tensors` (plain, DTensor, or a Part) in place, each rank what it holds.

    `group`: the ranks that load together and fail together; None: this process for itself, also
    where a default process group exists. Raises CheckpointError for pieces that do not fit.
    """
    parts = {n: t if isinstance(t, Part) else Part.of(t) for n, t in tensors.items()}
    try:
        load(
            {},  # the planner has it
            storage_reader=MetadataReader(folder, metadata),
            planner=_PartsPlanner(parts),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # DCP's, and no Exception: one cause for each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"cannot read the tensors of {folder} on rank {rank} ({type(cause).__name__}: {cause})",
            other_choice(folder),
        ) from cause


def _check(metadata: Any, manifest: Manifest) -> None:
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f"it holds a {type(metadata).__name__}, not DCP metadata")
    pieces = metadata.storage_data
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(tensor, dcp.TensorStorageMetadata):
            raise CheckpointError(f"its entry {name!r} is no tensor")
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise CheckpointError(f"the pieces of {name} do not make up its size")
        for chunk in tensor.chunks:
            _check_chunk(name, tensor, chunk)
            place = pieces[dcp.MetadataIndex(name, chunk.offsets)]
            _check_place(name, place, manifest)
            if place.length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
                raise CheckpointError(f"a piece of {name} is larger than its bytes")


def _check_chunk(
    name: str, tensor: dcp.TensorStorageMetadata, chunk: dcp.ChunkStorageMetadata
) -> None:
    if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size):
        raise CheckpointError(f"a piece of {name} has another number of dims")
    for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True):
        if offset < 0 or size < 0 or offset + size > whole:
            raise CheckpointError(f"a piece of {name} lies outside it")


def _check_place(name: str, place: Any, manifest: Manifest) -> None:
    if not isinstance(place, _StorageInfo) or getattr(place, "transform_descriptors", None):
        raise CheckpointError(f"a piece of {name} is stored in an unknown way")
    digest = manifest.files.get(place.relative_path)
    if digest is None:
        raise CheckpointError(f"{name} lies in {place.relative_path!r}, not in the manifest")
    if place.offset < 0 or place.length < 0 or place.offset + place.length > digest.size:
        raise CheckpointError(f"{name} lies beyond the end of {place.relative_path}")
