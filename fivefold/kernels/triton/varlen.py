"""Sequences of any lengths in one packed tensor, in blocks, with the lengths left on the device."""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

from fivefold.kernels.triton.language import tl, triton


def block_count(rows: int, sequences: int, block: int) -> int:
    """Blocks of `block` rows to launch for `rows` rows in `sequences` parts of unknown lengths.

    Sequence i gets its blocks from number starts[i] // block + i on. Up to the next one's that is
    floor(b / block) + 1 - floor(a / block) of them, never less than its ceil((b - a) / block) and
    at most one too many, which find nothing to do. So the host need not wait for the lengths.
    """
    return rows // block + sequences


@triton.jit
def sequence_of_block(
    starts: tl.tensor, block: tl.tensor, sequences: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """The sequence that block number `block` belongs to, by bisection of `starts`."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // ROWS + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def sequence_of_row(starts: tl.tensor, row: tl.tensor, sequences: tl.tensor) -> tl.tensor:
    """The sequence that row number `row` belongs to: the last that starts at it or before."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1
