"""Tokenized documents on disk: written once as shards, then memory-mapped.

A shard is four files: `.tokens` (uint16 or uint32), `.offsets` (int64, one more than documents:
where each starts), `.hashes` (uint64 a document) and, where only answers are learnt, `.learnt`
(one bit a token, lowest first). All little-endian.
"""

from __future__ import annotations

# N tokens of a source, C documents of a source
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import DataError
from fivefold.engines.train.data.encode import Encoded
from fivefold.engines.train.data.manifest import REBUILD, Manifest, ShardEntry, ShardFile

SHARD_TOKENS = 64 << 20


class ShardWriter:
    """Appends encoded tasks to one shard after another."""

    def __init__(self, folder: Path, dtype: type[Any], has_answers: bool) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._has_answers = has_answers
        self._open: _OpenShard | None = None
        self.entries: list[ShardEntry] = []

    def append(self, encoded: Encoded) -> None:
        """Add the documents of one task."""
        if not len(encoded.lengths):
            return
        if self._open is None:
            stem = self._folder / f"shard-{len(self.entries):05d}"
            self._open = _OpenShard(stem, self._has_answers)
        self._open.append(encoded, self._dtype)
        if self._open.tokens >= SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        """End the shard that is open."""
        if self._open is not None:
            self.entries.append(self._open.close())
            self._open = None


class _OpenShard:
    def __init__(self, stem: Path, has_answers: bool) -> None:
        roles = ["tokens", "offsets", "hashes"] + (["learnt"] if has_answers else [])
        self._files = {role: _HashedFile(stem.with_suffix(f".{role}")) for role in roles}
        self._files["offsets"].write(np.zeros(1, "<i8"))
        self._bits = np.zeros(0, np.uint8)  # fewer than 8 that do not fill a byte yet
        self.documents = 0
        self.tokens = 0

    def append(self, encoded: Encoded, dtype: np.dtype[Any]) -> None:
        self._files["tokens"].write(encoded.tokens.astype(dtype))
        offsets = self.tokens + np.cumsum(encoded.lengths, dtype="<i8")
        self._files["offsets"].write(offsets)
        self._files["hashes"].write(encoded.hashes.astype("<u8"))
        if encoded.learnt is not None:
            bits = np.concatenate([self._bits, encoded.learnt])
            whole = len(bits) // 8 * 8
            self._files["learnt"].write(np.packbits(bits[:whole], bitorder="little"))
            self._bits = bits[whole:]
        self.documents += len(encoded.lengths)
        self.tokens += len(encoded.tokens)

    def close(self) -> ShardEntry:
        if len(self._bits):
            self._files["learnt"].write(np.packbits(self._bits, bitorder="little"))
        files = {role: file.close() for role, file in self._files.items()}
        return ShardEntry(self.documents, self.tokens, files)


class _HashedFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, values: NDArray[Any]) -> None:
        data = values.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def close(self) -> ShardFile:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return ShardFile(self._path.name, self._bytes, self._hash.hexdigest())


class TokenizedSource:
    """The documents of one source, memory-mapped. Only offsets and hashes are held in memory.

    lengths [C], starts [C] (each document's first token, counted over all shards), hashes [C].
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Open `folder`. Raises DataError naming the file that is missing or of another size."""
        self.folder = folder
        self.manifest = manifest
        entries = manifest.shards
        token = np.dtype(manifest.dtype).newbyteorder("<")
        self._tokens = [_map(folder, e.files["tokens"], token) for e in entries]
        self._learnt = [
            _map(folder, e.files["learnt"], np.dtype("u1")) for e in entries if "learnt" in e.files
        ]
        bases = np.cumsum([0] + [e.tokens for e in entries], dtype=np.int64)
        self._bases = bases[:-1]
        offsets = [_map(folder, e.files["offsets"], np.dtype("<i8")) for e in entries]
        hashes = [_map(folder, e.files["hashes"], np.dtype("<u8")) for e in entries]
        self.lengths: NDArray[np.int64] = _joined([np.diff(o) for o in offsets], np.int64)
        self.starts: NDArray[np.int64] = _joined(
            [o[:-1] + base for o, base in zip(offsets, bases, strict=False)], np.int64
        )
        self.hashes: NDArray[np.uint64] = _joined(hashes, np.uint64)

    def verify(self, share: int, shares: int) -> None:
        """Compare every `shares`-th shard's files with their SHA-256, from the `share`-th on.

        Raises DataError naming the file that differs.
        """
        for entry in self.manifest.shards[share::shares]:
            for file in entry.files.values():
                path = self.folder / file.name
                with path.open("rb") as opened:
                    if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                        raise DataError(f"{path} is corrupt: its SHA-256 is another", REBUILD)

    def tokens_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens at these places of the source. Any shape; same shape out."""
        return self._gather(self._tokens, index, lambda tokens, at: tokens[at])

    def learnt_at(self, index: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Whether the tokens at these places are to be learnt; None: all are."""
        if not self._learnt:
            return None
        bits = self._gather(self._learnt, index, lambda b, at: (b[at >> 3] >> (at & 7)) & 1)
        return bits.astype(np.bool_)

    def _gather(
        self, shards: list[NDArray[Any]], index: NDArray[np.int64], read: Any
    ) -> NDArray[Any]:
        if len(shards) == 1:
            return read(shards[0], index).astype(np.int64)
        owner = np.searchsorted(self._bases, index, side="right") - 1
        values = np.empty(index.shape, np.int64)
        for number in np.unique(owner):
            here = owner == number
            values[here] = read(shards[number], index[here] - self._bases[number])
        return values


def _map(folder: Path, file: ShardFile, dtype: np.dtype[Any]) -> NDArray[Any]:
    path = folder / file.name
    try:
        size = path.stat().st_size
        if size != file.bytes:
            raise DataError(f"{path} has {size} bytes, but should have {file.bytes}", REBUILD)
        return np.asarray(np.memmap(path, dtype, mode="r"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing", REBUILD) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", REBUILD) from None


def _joined(parts: Iterable[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    held = [np.asarray(part, dtype) for part in parts]
    return np.concatenate(held) if held else np.zeros(0, dtype)
