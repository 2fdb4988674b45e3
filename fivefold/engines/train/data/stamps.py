"""Content hashes of source files, remembered so that an unchanged file is not read again.

A file whose size and modification time are those of the last time keeps its hash, unless it was
modified so shortly before it was hashed that a second change could carry the same time (git's
"racy" rule).
"""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from fivefold.core.errors import DataError
from fivefold.engines.train.data.discover import SourceFiles
from fivefold.engines.train.data.files import write_atomically

RACY_NS = 2_000_000_000  # coarser than any file system's clock in use
HASHING_THREADS = 4


@dataclass(frozen=True)
class Stamp:
    """One file's name inside its source, size in bytes, times in ns, and SHA-256."""

    name: str
    bytes: int
    modified_ns: int
    hashed_ns: int
    sha256: str


def stamp_files(source: SourceFiles, cache: Path) -> tuple[Stamp, ...]:
    """Stamps of all files of `source`, remembered under `cache`. Raises DataError on unreadable."""
    memory = cache / "sources" / f"{source.key}.json"
    known = _remembered(memory)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        stamps = tuple(pool.map(lambda f: _stamp(f, source.relative(f), known), source.files))
    if known != {stamp.name: stamp for stamp in stamps}:
        write_atomically(memory, json.dumps([asdict(stamp) for stamp in stamps], indent=0))
    return stamps


def content_hash(stamps: tuple[Stamp, ...]) -> str:
    """One SHA-256 for the names and contents of all files."""
    lines = "".join(f"{stamp.sha256} {stamp.name}\n" for stamp in stamps)
    return hashlib.sha256(lines.encode()).hexdigest()


def _stamp(file: Path, name: str, known: dict[str, Stamp]) -> Stamp:
    try:
        stat = file.stat()
        before = known.get(name)
        if (
            before is not None
            and (before.bytes, before.modified_ns) == (stat.st_size, stat.st_mtime_ns)
            and before.hashed_ns - before.modified_ns > RACY_NS
        ):
            return before
        now = time.time_ns()
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", "make it readable") from None
    return Stamp(name, stat.st_size, stat.st_mtime_ns, now, digest)


def _remembered(memory: Path) -> dict[str, Stamp]:
    """What was known; nothing when that is missing or unreadable: it is only a memory."""
    try:
        return {entry["name"]: Stamp(**entry) for entry in json.loads(memory.read_text("utf-8"))}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
