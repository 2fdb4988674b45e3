"""One safetensors file: its header checked against its size, its tensors mapped.

The format is eight bytes of header length, a JSON header with dtype, shape and byte range of each
tensor, and the bytes. It is read here, and not by the library's `safe_open`, so that a truncated
file names the tensor it broke, and pages of converted tensors can be let go of.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import WeightsError
from fivefold.weights.mapped_file import MappedFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_MAX_HEADER = 100_000_000  # bytes, as the format says
_LENGTH = struct.Struct("<Q")
_POINTER = b"version https://git-lfs"
_AGAIN = "copy it again from the model's origin"


@dataclass(frozen=True)
class Placed:
    """A tensor's dtype (as the file spells it), shape, and byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """The tensors of a file. Raises WeightsError when its header and its size do not agree."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        header, data = self._read_header()
        self.placed = {
            name: self._place(name, record, data)
            for name, record in header.items()
            if name != "__metadata__"
        }
        for name, tensor in sorted(self.placed.items(), key=lambda item: item[1].start):
            if tensor.end > self._file.size:
                raise WeightsError(
                    f"{path} is truncated: {name} ends at byte {tensor.end}, "
                    f"but the file has {self._file.size}",
                    _AGAIN,
                )

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
        """A tensor in `dtype`; a view of the mapped file where nothing has to be converted."""
        placed = self.placed[name]
        if placed.dtype not in DTYPES:
            raise WeightsError(
                f"{name} in {self.path} is stored as {placed.dtype}, which is not read",
                f"use weights in {', '.join(DTYPES)}, or a GGUF file",
            )
        stored = self._file.tensor(placed.start, placed.shape, DTYPES[placed.dtype])
        wanted = stored.to(device=device, dtype=dtype)
        if wanted.data_ptr() != stored.data_ptr():
            self._file.release(placed.start, placed.end - placed.start)
        return wanted

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The JSON header, and where the tensors' bytes begin."""
        if self._file.bytes[: len(_POINTER)] == _POINTER:
            raise WeightsError(f"{self.path} is a Git LFS pointer, no weights", "run: git lfs pull")
        if self._file.size < _LENGTH.size:
            raise WeightsError(
                f"{self.path} is truncated: {self._file.size} bytes hold no header", _AGAIN
            )
        (length,) = _LENGTH.unpack_from(self._file.bytes)
        end = _LENGTH.size + length
        if length > _MAX_HEADER:
            raise WeightsError(
                f"{self.path} is corrupt: a header of {length} bytes, more than {_MAX_HEADER}",
                _AGAIN,
            )
        if end > self._file.size:
            raise WeightsError(
                f"{self.path} is truncated: its header ends at byte {end}, "
                f"but the file has {self._file.size}",
                _AGAIN,
            )
        try:
            header = json.loads(self._file.bytes[_LENGTH.size : end])
        except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
            raise WeightsError(f"{self.path} is corrupt: header: {error}", _AGAIN) from None
        if not isinstance(header, dict):
            raise WeightsError(f"{self.path} is corrupt: its header is no object", _AGAIN)
        return header, end

    def _place(self, name: str, record: Any, data: int) -> Placed:
        try:
            shape = tuple(record["shape"])
            start, end = record["data_offsets"]
            dtype = str(record["dtype"])
            if not all(type(value) is int and value >= 0 for value in (*shape, start, end)):
                raise ValueError("sizes that are no whole numbers")
            stored = DTYPES.get(dtype)
            if stored is not None and end - start != math.prod(shape) * stored.itemsize:
                raise ValueError(
                    f"{end - start} bytes for shape {list(shape)} in {dtype}, "
                    f"not {math.prod(shape) * stored.itemsize}"
                )
        except (KeyError, TypeError, ValueError) as error:
            cause = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise WeightsError(
                f"{self.path} is corrupt: header entry of {name}: {cause}", _AGAIN
            ) from None
        return Placed(dtype, shape, data + start, data + end)
