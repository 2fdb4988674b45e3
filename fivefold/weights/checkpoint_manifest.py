"""What lies in a folder of checkpoints, and the manifest that says a checkpoint is whole.

checkpoints/
  step-00000100/     one whole checkpoint: it holds manifest.json, written last
  step-*.partial/    being written, being removed, or left by a run that died: never read
  step-*.replaced/   the old one while a second save of the same step takes its place
  latest, best       small files that name a step folder
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fivefold.core.errors import CheckpointError

FORMAT = "fivefold-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
METADATA = ".metadata"
MODEL_FOLDER = "model"
PARTIAL = ".partial"
REPLACED = ".replaced"
LATEST = "latest"
BEST = "best"

_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_READ_BYTES = 4 << 20
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # of a broken manifest


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hex) that a file must have."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` records. `files` are paths below the checkpoint, with `/`."""

    step: int
    world_size: int  # ranks that wrote it
    layout: str  # how they were laid out, for people
    files: dict[str, FileDigest]

    def dumps(self) -> str:
        """The text of manifest.json."""
        head: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        return json.dumps(head | asdict(self), indent=1)


def step_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name says; None when it is not the name of a whole checkpoint."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def whole_checkpoints(checkpoints: Path) -> list[Path]:
    """Step folders below `checkpoints`, newest first.

    A folder gets such a name by one rename, after everything in it was synced to disk.
    """
    if not checkpoints.is_dir():
        return []
    found = [(step_of(path), path) for path in checkpoints.iterdir() if path.is_dir()]
    return [path for _, path in sorted(((s, p) for s, p in found if s is not None), reverse=True)]


def read_pointer(checkpoints: Path, name: str) -> Path | None:
    """The folder that `latest` or `best` names; None when there is none of that name."""
    try:
        target = checkpoints / (checkpoints / name).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    # The name only: a pointer leads nowhere outside its folder.
    if target.parent != checkpoints or step_of(target) is None or not target.is_dir():
        return None
    return target


def find_latest(checkpoints: Path) -> Path | None:
    """The checkpoint to go on from: what `latest` names, else the newest whole one, else None."""
    pointed = read_pointer(checkpoints, LATEST)
    if pointed is not None:
        return pointed
    return next(iter(whole_checkpoints(checkpoints)), None)


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`. Raises CheckpointError when it is missing, damaged or not ours."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}, so it is not a whole checkpoint",
            "give a step-* folder, or the run that holds it",
        )
    try:
        return _parse(path)
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error})", other_choice(folder)
        ) from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the checkpoint. Raises CheckpointError naming the file."""
    path = folder / name
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", other_choice(folder)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", other_choice(folder))
    return value


def fault_of(folder: Path, name: str, digest: FileDigest) -> str | None:
    """What is wrong with one file of a checkpoint, read as a whole; None when nothing is."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return "leads outside the checkpoint"
        size = path.stat().st_size
        if size != digest.size:
            word = "truncated" if size < digest.size else "too long"
            return f"is {word}: {size} bytes, not {digest.size}"
        if hash_file(path) != digest.sha256:
            return "is corrupt: its SHA-256 is not the manifest's"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def other_choice(folder: Path) -> str:
    """The mend for a damaged checkpoint: the newest whole one beside it, verified file by file."""
    for other in whole_checkpoints(folder.parent):
        if other.name != folder.name and _is_sound(other):
            return f"delete {folder} to go on from {other.name}, which was verified whole"
    return f"no other whole checkpoint is beside it: delete {folder} to start anew"


def _is_sound(folder: Path) -> bool:
    try:
        files = _parse(folder / MANIFEST).files
    except (CheckpointError, *_DAMAGE):
        return False
    return all(fault_of(folder, name, digest) is None for name, digest in files.items())


def _parse(path: Path) -> Manifest:
    record = json.loads(path.read_text("utf-8"))
    if record["format"] != FORMAT:
        raise CheckpointError(
            f"{path} says format {record['format']!r}, not {FORMAT!r}", "give another folder"
        )
    if record["version"] != VERSION:
        raise CheckpointError(
            f"{path} has format version {record['version']}, this program reads {VERSION}",
            "use the release of fivefold that wrote it",
        )
    files = {
        _inside(path, name): FileDigest(int(entry["size"]), str(entry["sha256"]))
        for name, entry in record["files"].items()
    }
    return Manifest(int(record["step"]), int(record["world_size"]), str(record["layout"]), files)


def _inside(manifest: Path, name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{manifest} names {name!r}, which lies outside the checkpoint",
            "do not use this folder: fivefold writes no such name",
        )
    return name
