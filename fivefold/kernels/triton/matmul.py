"""A matrix product whose rows do not know each other: the deterministic policy's GEMM on GPUs.

cuBLAS chooses its tile, and whether to split the sum over K, by the shape, so a row's bits depend
on how many rows there are (He 2025, "Defeating Nondeterminism in LLM Inference"). Here one tile
serves every shape and K is walked from its start to its end. Few rows waste arithmetic, which they
have to spare: a product with few rows waits for its weight.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# M rows, K summed over, N columns
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.kernels.triton.language import PRECISION, check, on_device_of, tl, triton

ROWS, COLUMNS = 128, 128
DEPTH_BYTES = 128  # of K a step: what one fetch of shared memory's swizzled rows holds
WARPS, STAGES = 8, 3
# Tiles of so many rows run side by side over the same columns, which then come from the L2 cache.
ROWS_TOGETHER = 8


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [M,K] @ b [K,N] + bias [N] in a's dtype: fp32 sums over K in order, rounded once.

    Any strides, so a weight [N,K] comes as `weight.mT`. fp32 operands are multiplied in fp32, not TF32.
    """
    check("matmul", a, b)
    if a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise FivefoldError(
            f"matmul of {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}",
            "give [M,K] and [K,N] of one format",
        )
    (rows, depth), columns = a.shape, b.shape[1]
    y = a.new_empty(rows, columns)
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    if tiles:
        with on_device_of(a):
            matmul_kernel[(tiles,)](
                a, b, bias, y, rows, columns, depth, *a.stride(), *b.stride(),
                ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH_BYTES // a.itemsize,
                TOGETHER=ROWS_TOGETHER, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
    return y


@triton.jit
def tile_of(
    program: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor, TOGETHER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Bands of TOGETHER row tiles, column by column within a band: near programs share operands."""
    in_band = TOGETHER * column_tiles
    first = program // in_band * TOGETHER
    height = tl.minimum(row_tiles - first, TOGETHER)
    return first + program % in_band % height, program % in_band // height


@triton.jit
def product(
    a: tl.tensor,
    b: tl.tensor,
    rows_inside: tl.tensor,
    columns_inside: tl.tensor,
    depth: tl.tensor,
    a_depth: tl.tensor,
    b_depth: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """fp32 sums over `depth` in order; a [ROWS] and b [COLUMNS] point to where each sum starts."""
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    steps = tl.arange(0, DEPTH)
    for start in range(0, depth, DEPTH):
        k = (start + steps).to(tl.int64)
        within = k < depth
        left = tl.load(
            a[:, None] + k[None, :] * a_depth,
            mask=rows_inside[:, None] & within[None, :],
            other=0.0,
        )
        right = tl.load(
            b[None, :] + k[:, None] * b_depth,
            mask=within[:, None] & columns_inside[None, :],
            other=0.0,
        )
        total = tl.dot(left, right.to(left.dtype), total, input_precision=PRECISION)
    return total


# Row counts are not specialised on: one row or a multiple of 16 would compile to another program.
@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    a: tl.tensor,
    b: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    a_row: tl.tensor,
    a_depth: tl.tensor,
    b_depth: tl.tensor,
    b_column: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """One tile of the result a program."""
    row_tile, column_tile = tile_of(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS), TOGETHER
    )
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = column_tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = product(
        a + row * a_row, b + column * b_column, row < rows, column < columns,
        depth, a_depth, b_depth, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    at = y + row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside)
