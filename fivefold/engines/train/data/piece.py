"""One part of one file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Where it starts and stops (bytes of a text or JSONL file, row groups of a Parquet file,
    record batches of an Arrow file), the number of its first line or row (from 1), its size in
    bytes on disk, and the bytes after which its text is cut into documents (0: never).
    """

    path: str
    start: int
    stop: int
    first: int
    bytes: int
    cut: int = 0
