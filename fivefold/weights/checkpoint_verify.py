"""Holding a checkpoint's files to its manifest, and naming the tensors that damage hit."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from fivefold.core.errors import CheckpointError
from fivefold.weights.checkpoint_manifest import (
    METADATA,
    FileDigest,
    Manifest,
    fault_of,
    other_choice,
)
from fivefold.weights.checkpoint_metadata import read_metadata

_NAMES_SHOWN = 3


class Damage(NamedTuple):
    """One file that is not what the manifest says, and in which way."""

    file: str
    fault: str


def find_damage(folder: Path, files: Iterable[tuple[str, FileDigest]]) -> list[Damage]:
    """Read `files` (below `folder`) as a whole; those that differ from their digests."""
    faults = ((name, fault_of(folder, name, digest)) for name, digest in files)
    return [Damage(name, fault) for name, fault in faults if fault is not None]


def damage_error(folder: Path, manifest: Manifest, damage: list[Damage]) -> CheckpointError:
    """One line: the first damaged file, the tensors it takes along, and what to use instead."""
    first = damage[0]
    tensors = _tensors_hit(folder, manifest, first.file) if _readable(damage) else []
    hit = f" (hit: {_listed(tensors)})" if tensors else ""
    more = f"; {len(damage) - 1} more damaged" if len(damage) > 1 else ""
    return CheckpointError(f"{folder / first.file} {first.fault}{hit}{more}", other_choice(folder))


def verify(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointError unless the files `names` are in the manifest, and as it says."""
    wanted = []
    for name in names:
        if name not in manifest.files:
            raise CheckpointError(f"{folder} holds no {name}", other_choice(folder))
        wanted.append((name, manifest.files[name]))
    if damage := find_damage(folder, wanted):
        raise damage_error(folder, manifest, damage)


def _readable(damage: list[Damage]) -> bool:
    return all(item.file != METADATA for item in damage)


def _tensors_hit(folder: Path, manifest: Manifest, file: str) -> list[str]:
    """Tensors with a piece in `file` that is cut off, or whose own checksum fails."""
    try:
        metadata = read_metadata(folder, manifest)
        data = (folder / file).read_bytes() if (folder / file).is_file() else b""
    except (CheckpointError, OSError):
        return []
    return sorted(
        {
            index.fqn
            for index, place in metadata.storage_data.items()
            if place.relative_path == file
            and not _sound(data[place.offset : place.offset + place.length], place.length)
        }
    )


def _sound(data: bytes, length: int) -> bool:
    """Each piece is a zip archive by torch.save, with a CRC of each member."""
    if len(data) != length:
        return False
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, RuntimeError):
        return False


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown
