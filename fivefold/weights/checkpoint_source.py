"""A checkpoint of our own as a source of weights: no process group and no optimizer state needed.

A path may be a step folder, a run, a run's `checkpoints` folder, or one of the pointers in it.
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
    BEST,
    LATEST,
    MANIFEST,
    METADATA,
    MODEL_FOLDER,
    PARTIAL,
    REPLACED,
    Manifest,
    find_latest,
    read_json,
    read_manifest,
    read_pointer,
    step_of,
)
from fivefold.weights.checkpoint_metadata import load_into, read_metadata, tensors_of
from fivefold.weights.checkpoint_verify import verify

MODEL_PREFIX = "model/"


def is_checkpoint(path: str | Path) -> bool:
    """True for what `resolve_checkpoint` is about: a checkpoint, or a place that holds them.

    Also true of a run without any checkpoint yet, and of half-written ones: resolving those says
    what is the matter.
    """
    path = Path(path)
    if path.name in (LATEST, BEST) and path.is_file():
        return True
    if not path.is_dir():
        return False
    if step_of(path) is not None or path.name.endswith((PARTIAL, REPLACED)):
        return True
    return (path / MANIFEST).is_file() or _checkpoints_of(path) is not None


def resolve_checkpoint(path: str | Path) -> Path:
    """The folder of one whole checkpoint that `path` means; of several, the latest.

    Raises CheckpointError when there is none.
    """
    path = Path(path)
    if path.is_file():
        return _follow(path)
    if path.name.endswith((PARTIAL, REPLACED)):
        raise CheckpointError(
            f"{path} is a half-written checkpoint", f"give the folder that holds it: {path.parent}"
        )
    if (path / MANIFEST).is_file():
        return path
    if not path.is_dir() or step_of(path) is not None:
        read_manifest(path)  # says what is missing
    checkpoints = _checkpoints_of(path)
    latest = find_latest(checkpoints) if checkpoints is not None else None
    if latest is None:
        raise CheckpointError(
            f"{path} holds no checkpoint yet", "train it further, or give another path"
        )
    return latest


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


def _checkpoints_of(path: Path) -> Path | None:
    """The folder of checkpoints that `path` is, or has; None when neither."""
    if (path / "checkpoints").is_dir():
        return path / "checkpoints"
    if (path / LATEST).is_file() or any(path.glob("step-*")):
        return path
    return None


def _follow(pointer: Path) -> Path:
    target = read_pointer(pointer.parent, pointer.name)
    if target is None:
        raise CheckpointError(
            f"{pointer} names no checkpoint beside it", f"give a folder of {pointer.parent}"
        )
    return target
