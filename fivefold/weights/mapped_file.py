"""A file of tensors mapped into memory: pages come from disk when touched, and can be let go."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from fivefold.core.errors import WeightsError


class MappedFile:
    """Bytes of a file as tensors, without reading it.

    The mapping is private: whoever writes to a tensor gets a copy of the page, the file stays as
    it is. Processes that map the same file share its pages.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                # An empty file cannot be mapped, and has no tensors.
                self.bytes: mmap.mmap | bytes = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b""
                )
        except OSError as error:
            raise WeightsError(
                f"cannot read {path}: {error.strerror}", "check the path and its permissions"
            ) from None

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that lies at `offset` bytes: a view, where its alignment allows."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        view = torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=offset)
        if offset % dtype.itemsize:  # the standard formats allow it, compiled code may not
            view = view.clone()
        return view.view(shape)

    def release(self, offset: int, length: int) -> None:
        """Let go of the pages of a part that was read: what is copied need not stay twice."""
        if isinstance(self.bytes, bytes) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self.bytes.madvise(mmap.MADV_DONTNEED, start, end - start)
