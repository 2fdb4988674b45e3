"""What a folder of tokenized shards holds: written last, so a folder with it is whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fivefold.core.errors import DataError
from fivefold.engines.train.data.files import write_atomically

FORMAT = 1
NAME = "manifest.json"
REBUILD = "delete that folder, it is built again from the sources"


@dataclass(frozen=True)
class ShardFile:
    """One file: its name, size in bytes and SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardEntry:
    """One shard: counts, and its files by role (tokens, offsets, hashes, learnt)."""

    documents: int
    tokens: int
    files: dict[str, ShardFile]


@dataclass(frozen=True)
class Manifest:
    """Everything that decides whether a folder still answers for its source."""

    format: int
    source: str  # the path as configured
    source_sha256: str  # of the contents of all files
    files: dict[str, str]  # name to SHA-256
    tokenizer: str  # fingerprint
    dtype: str  # of a token: uint16 or uint32, little-endian
    form: str  # text, pair or chat
    documents: int
    tokens: int
    empty_records: int
    shards: tuple[ShardEntry, ...]

    def write(self, folder: Path) -> None:
        """Into `folder`, as its last file."""
        write_atomically(folder / NAME, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """None when there is none, or one of another format. Raises DataError when damaged."""
        path = folder / NAME
        try:
            values = json.loads(path.read_text("utf-8"))
            return _parse(values) if values["format"] == FORMAT else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            raise DataError(f"{path} is damaged", REBUILD) from None

    def changed_file(self, files: dict[str, str]) -> str | None:
        """The first file that was added, changed or removed since, with which of these it was."""
        for name in sorted(self.files.keys() | files.keys()):
            if name not in files:
                return f"{name} was removed"
            if name not in self.files:
                return f"{name} was added"
            if self.files[name] != files[name]:
                return f"{name} changed"
        return None


def _parse(values: dict[str, Any]) -> Manifest:
    shards = tuple(
        ShardEntry(
            entry["documents"],
            entry["tokens"],
            {role: ShardFile(**file) for role, file in entry["files"].items()},
        )
        for entry in values.pop("shards")
    )
    return Manifest(**values, shards=shards)
