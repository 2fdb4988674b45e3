"""Which checkpoints stay, and clearing what runs that died have left."""

from __future__ import annotations

from pathlib import Path

from fivefold.engines.train.checkpoint.files import Files
from fivefold.weights.checkpoint_manifest import (
    BEST,
    LATEST,
    PARTIAL,
    REPLACED,
    read_pointer,
    step_of,
    whole_checkpoints,
)


def to_remove(checkpoints: Path, keep: int) -> list[Path]:
    """Whole checkpoints beyond the newest `keep` up to `latest`, except `latest` and `best`.

    Those after `latest` stay: someone may have set `latest` back to look at another way on, and
    the run replaces them one by one as it reaches their steps.
    """
    latest = read_pointer(checkpoints, LATEST)
    if latest is None:
        return []
    newest = step_of(latest)
    assert newest is not None
    past = [path for path in whole_checkpoints(checkpoints) if (step_of(path) or 0) <= newest]
    return [path for path in past[keep:] if path not in (latest, read_pointer(checkpoints, BEST))]


def prune(checkpoints: Path, keep: int, files: Files) -> None:
    """Remove what `to_remove` says. A folder loses its name before its files, in one step."""
    for path in to_remove(checkpoints, keep):
        doomed = path.with_name(path.name + PARTIAL)
        if doomed.exists():
            files.remove(doomed)
        files.rename(path, doomed)
        files.remove(doomed)


def clear_leftovers(checkpoints: Path, files: Files) -> None:
    """Undo half of what a dead run was doing: partial files go, a half-done swap is taken back."""
    if not checkpoints.is_dir():
        return
    for path in sorted(checkpoints.glob(f"*{REPLACED}")):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if original.exists():
            files.remove(path)
        else:
            files.rename(path, original)
    for path in sorted(checkpoints.glob(f"*{PARTIAL}")):
        files.remove(path)
