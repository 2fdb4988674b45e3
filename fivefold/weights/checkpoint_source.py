"""A checkpoint of our own as a source of weights: no process group and no optimizer state needed.

Paths are what `checkpoint_place.resolve_checkpoint` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from fivefold.core.errors import CheckpointError, nearest
from fivefold.weights.checkpoint_manifest import (
    METADATA,
    MODEL_FOLDER,
    Manifest,
    read_json,
    read_manifest,
)
from fivefold.weights.checkpoint_metadata import load_into, read_metadata, tensors_of
from fivefold.weights.checkpoint_place import resolve_checkpoint
from fivefold.weights.checkpoint_verify import verify

MODEL_PREFIX = "model/"


def read_config(path: str | Path) -> dict[str, Any]:
    """The model's `config.json`, in Hugging Face spelling. Raises CheckpointError."""
    folder = resolve_checkpoint(path)
    name = f"{MODEL_FOLDER}/config.json"
    verify(folder, read_manifest(folder), [name])
    return read_json(folder, name)


def tokenizer_folder(path: str | Path) -> Path:
    """The folder of tokenizer files, each verified. Raises CheckpointError when one is damaged."""
    folder = resolve_checkpoint(path)
    manifest = read_manifest(folder)
    verify(folder, manifest, [n for n in manifest.files if n.startswith(f"{MODEL_FOLDER}/")])
    return folder / MODEL_FOLDER


def tensor_shapes(path: str | Path) -> dict[str, torch.Size]:
    """Names and shapes of the model's tensors, without reading their values."""
    _, _, metadata = _open(path)
    return {
        name.removeprefix(MODEL_PREFIX): entry.size
        for name, entry in tensors_of(metadata).items()
        if name.startswith(MODEL_PREFIX)
    }


def read_tensors(
    path: str | Path, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, full tensor on the host), one at a time: all, or those in `names`.

    Every file that holds one of them is verified before the first is yielded. Raises
    CheckpointError for a damaged file or an unknown name.
    """
    folder, manifest, metadata = _open(path)
    held = tensors_of(metadata)
    known = {name.removeprefix(MODEL_PREFIX) for name in held if name.startswith(MODEL_PREFIX)}
    wanted = sorted(known) if names is None else list(names)
    for name in wanted:
        if name not in known:
            raise CheckpointError(f"{folder} holds no tensor {name}", nearest(name, known))
    keys = {MODEL_PREFIX + name for name in wanted}
    files = {p.relative_path for index, p in metadata.storage_data.items() if index.fqn in keys}
    verify(folder, manifest, sorted(files))
    for name in wanted:
        key = MODEL_PREFIX + name
        entry = held[key]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        load_into({key: tensor}, folder, metadata)
        yield name, tensor


def _open(path: str | Path) -> tuple[Path, Manifest, Metadata]:
    folder = resolve_checkpoint(path)
    manifest = read_manifest(folder)
    verify(folder, manifest, [METADATA])
    return folder, manifest, read_metadata(folder, manifest)
