"""Which checkpoint a path means: a step folder, a run, its `checkpoints`, or a pointer in it."""

from __future__ import annotations

from pathlib import Path

from fivefold.core.errors import CheckpointError
from fivefold.weights.checkpoint_manifest import (
    BEST,
    LATEST,
    MANIFEST,
    PARTIAL,
    REPLACED,
    find_latest,
    read_manifest,
    read_pointer,
    step_of,
)


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
