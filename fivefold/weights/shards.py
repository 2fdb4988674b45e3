"""Which files of a Hugging Face folder hold its weights: one, or several with an index."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from fivefold.core.errors import WeightsError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_AGAIN = "copy it again from the model's origin"


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Files with weights, each with the tensors that the index expects in it (None: no index).

    Empty when the folder holds no weights. Raises WeightsError for weights that are only there as
    pickles, and for an index that is damaged or leads outside the folder.
    """
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    if (folder / INDEX).is_file():
        return _indexed(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise WeightsError(
            f"{folder} has its weights only as pickles ({pickles[0]}), which can run code and "
            "are never read",
            "get the safetensors files from the model's origin",
        )
    return {}


def _indexed(folder: Path) -> dict[Path, list[str] | None]:
    index = folder / INDEX
    weight_map = _read_map(index)
    files: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        path = _inside(index, file)
        if not path.is_file():
            raise WeightsError(f"{index} places {name} in {file}, which is missing", _AGAIN)
        files.setdefault(path, [])
        files[path].append(name)  # type: ignore[union-attr]
    return files


def _read_map(index: Path) -> dict[str, str]:
    try:
        record: Any = json.loads(index.read_text("utf-8"))
        weight_map = record["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError("weight_map names files by something else than text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{index} is damaged ({type(error).__name__}: {error})", _AGAIN
        ) from None
    return weight_map


def _inside(index: Path, file: str) -> Path:
    """The path of a file that the index names, which must lie in its folder."""
    folder = index.parent
    plain = PurePosixPath(file)
    outside = WeightsError(
        f"{index} names {file!r}, which lies outside its folder",
        "do not use this folder, or put the real file in its place",
    )
    if plain.is_absolute() or ".." in plain.parts or "\\" in file or "\0" in file or not file:
        raise outside
    path = folder / file
    if not path.resolve().is_relative_to(_root(folder)):
        raise outside
    return path


def _root(folder: Path) -> Path:
    """Where links may lead: the folder; in the Hugging Face cache also the model's blobs beside."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent
    return folder
