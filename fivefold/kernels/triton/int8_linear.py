"""A linear layer with 8-bit weights, turned into the activations' format in registers.

A product with few rows waits for its weight, of which int8 is half the bytes. The integers up to
127 are exact in bf16, so the tensor cores multiply them as they are; the scale of an output channel
is common to its whole sum and is applied to it once, in fp32.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# N rows, I inputs, O outputs
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.kernels.triton.language import check, on_device_of, tl, triton
from fivefold.kernels.triton.matmul import (
    COLUMNS,
    DEPTH_BYTES,
    ROWS,
    ROWS_TOGETHER,
    STAGES,
    WARPS,
    product,
    tile_of,
)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [...,I] times (weight [O,I] int8 * scale [O]) transposed + bias [O]: [...,O] in x's dtype.

    The integers are multiplied with x and summed over I in fp32, in order; then scaled, then rounded
    once. One tile for every shape: a row's result depends on the row alone.
    """
    check("int8_linear", x, scale)
    if weight.dtype != torch.int8 or weight.shape[1] != x.shape[-1]:
        raise FivefoldError(
            f"int8_linear of {tuple(x.shape)} with a weight {tuple(weight.shape)} {weight.dtype}",
            "give int8 weights [O,I] for rows of I",
        )
    flat = x.reshape(-1, x.shape[-1])
    (rows, depth), columns = flat.shape, weight.shape[0]
    y = x.new_empty(rows, columns)
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    if tiles:
        with on_device_of(x):
            int8_linear_kernel[(tiles,)](
                flat, weight, scale.contiguous(), bias, y, rows, columns, depth,
                *flat.stride(), *weight.stride(),
                ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH_BYTES // x.itemsize,
                TOGETHER=ROWS_TOGETHER, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
    return y.view(*x.shape[:-1], columns)


@triton.jit(do_not_specialize=["rows"])
def int8_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    x_row: tl.tensor,
    x_depth: tl.tensor,
    weight_column: tl.tensor,
    weight_depth: tl.tensor,
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
        x + row * x_row, weight + column * weight_column, row < rows, column < columns,
        depth, x_depth, weight_depth, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    total *= tl.load(scale + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    at = y + row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside)
