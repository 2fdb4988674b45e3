"""Storages that live and die, as a log: which of them are gradients is known only at the end."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


class MemoryLog:
    """Every storage that an operator's result lies in, with the moments it changes its size.

    What operators need while they run, and free before they return, is not seen.
    """

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []  # (storage, bytes more or less)
        self._sizes: list[int] = []
        self._numbers: dict[int, int] = {}  # by address
        self._alive: dict[int, weakref.ref[Any]] = {}

    def see(self, result: Any) -> None:
        """Take note of an operator's result."""
        if isinstance(result, Tensor):
            self.number(result)
        elif isinstance(result, tuple | list):
            for part in result:
                self.see(part)

    def number(self, tensor: Tensor) -> int | None:
        """Which storage a tensor lies in; None for one without memory."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        found = self._numbers.get(address)
        if found is None:
            found = self._numbers[address] = len(self._sizes)
            self._sizes.append(0)
            self._alive[found] = weakref.ref(storage, lambda _: self._died(address))
            self._resized(address, storage.nbytes())
        return found

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The storages of tensors that have memory."""
        return {n for n in map(self.number, tensors) if n is not None}

    def bytes(self, storages: Collection[int]) -> int:
        """Their size now."""
        return sum(self._sizes[storage] for storage in storages)

    def now(self) -> int:
        """A moment, for `peak`."""
        return len(self._events)

    def peak(self, since: int, without: Collection[int] = ()) -> int:
        """The most bytes that lived at a time from a moment on, of storages not in `without`."""
        live = most = 0
        for moment, (storage, change) in enumerate(self._events):
            if storage not in without:
                live += change
            if moment >= since:
                most = max(most, live)
        return max(most, live)

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """FSDP frees gathered parameters by making their storages empty, which is no operator."""
        resize = torch.UntypedStorage.resize_

        def recorded(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = recorded  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _resized(self, address: int, size: int) -> None:
        number = self._numbers.get(address)
        if number is not None and size != self._sizes[number]:
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def _died(self, address: int) -> None:
        self._resized(address, 0)
        self._alive.pop(self._numbers.pop(address), None)
