"""The header of a GGUF file: metadata, and type, shape and place of each tensor.

Read here and not by `gguf.GGUFReader`, which takes seconds over a vocabulary (an array object for
each of its strings) and meets a truncated file without naming the tensor that it broke.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from fivefold.core.errors import WeightsError
from fivefold.weights.mapped_file import MappedFile

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_AGAIN = "copy it again from the model's origin"
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class Stored:
    """A tensor's type, shape (slowest dim first, as torch has it), and byte range in the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its tensors' bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def read_header(file: MappedFile) -> Header:
    """Read and check a header. Raises WeightsError for one that is damaged or promises too much."""
    if file.bytes[: len(MAGIC)] != MAGIC:
        raise WeightsError(f"{file.path} is no GGUF file", "it should begin with GGUF")
    cursor = _Cursor(file)
    try:
        metadata, tensors = _read(cursor)
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        if cursor.at + 8 > file.size or isinstance(error, struct.error):
            raise WeightsError(
                f"{file.path} is truncated: its header goes on beyond byte {file.size}, its end",
                _AGAIN,
            ) from None
        raise WeightsError(
            f"{file.path} is corrupt: header at byte {cursor.at}: {error}", _AGAIN
        ) from None
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.end > file.size:
            raise WeightsError(
                f"{file.path} is truncated: {tensor.name} ends at byte {tensor.end}, "
                f"but the file has {file.size}",
                _AGAIN,
            )
    return Header(metadata, {tensor.name: tensor for tensor in tensors})


class _Cursor:
    """Where reading stands. Reading beyond the end raises struct.error."""

    def __init__(self, file: MappedFile) -> None:
        self._bytes = file.bytes
        self._size = file.size
        self.at = len(MAGIC)

    def take(self, form: str, count: int = 1) -> tuple[Any, ...]:
        length = struct.calcsize(f"<{form}") * count
        if length > self._size - self.at:
            raise struct.error("beyond the end")
        values = struct.unpack_from(f"<{count}{form}", self._bytes, self.at)
        self.at += length
        return values

    def one(self, form: str) -> Any:
        return self.take(form)[0]

    def text(self) -> str:
        length = self.one("Q")
        if length > self._size - self.at:
            raise struct.error("beyond the end")
        self.at += length
        return self._bytes[self.at - length : self.at].decode("utf-8")


def _read(cursor: _Cursor) -> tuple[dict[str, Any], list[Stored]]:
    version = cursor.one("I")
    if version not in _VERSIONS:
        swapped = version & 0xFFFF == 0
        raise ValueError("big-endian files are not read" if swapped else f"version {version}")
    tensor_count, metadata_count = cursor.take("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text()
        metadata[key] = _value(cursor, GGUFValueType(cursor.one("I")))
    places = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment {alignment!r} is no power of two")
    data = -(-cursor.at // alignment) * alignment
    return metadata, [place(data) for place in places]


def _value(cursor: _Cursor, kind: GGUFValueType) -> Any:
    if kind in _SCALARS:
        return cursor.one(_SCALARS[kind])
    if kind == GGUFValueType.STRING:
        return cursor.text()
    item = GGUFValueType(cursor.one("I"))
    count = cursor.one("Q")
    if item in _SCALARS:
        return list(cursor.take(_SCALARS[item], count))
    if item == GGUFValueType.STRING:
        return [cursor.text() for _ in range(count)]
    raise ValueError("an array of arrays")


def _tensor(cursor: _Cursor) -> Callable[[int], Stored]:
    """One entry of the tensor table; its place is known once the table has been read."""
    name = cursor.text()
    dims = cursor.one("I")
    if dims > _MAX_DIMS:
        raise ValueError(f"{name} has {dims} dims")
    shape = tuple(reversed(cursor.take("Q", dims)))
    kind = GGMLQuantizationType(cursor.one("I"))
    offset = cursor.one("Q")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block:
        raise ValueError(f"{name} has rows of {shape[-1]}, not whole blocks of {block}")
    length = math.prod(shape) // block * block_bytes
    return lambda data: Stored(name, kind, shape, data + offset, data + offset + length)
