"""What tests of native kernels set up: threads, poisoned results, operands that lie awkwardly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaN until something is written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def half_of_packed(x: Tensor) -> Tensor:
    """The same numbers as the second half of rows twice as long, NaN before them."""
    packed = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    packed[..., x.shape[-1] :] = x
    return packed[..., x.shape[-1] :]


def unaligned(x: Tensor) -> Tensor:
    """The same numbers one element off the start of their memory."""
    memory = x.new_full((x.numel() + 1,), float("nan"))
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def crosswise(x: Tensor) -> Tensor:
    """The same numbers with the last dim's steps as long as all others together."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


LAYOUTS = {"dense": lambda x: x, "half": half_of_packed, "odd": unaligned, "across": crosswise}
