"""Many matrices, each times its own rows, counted on the device: what a mixture of experts computes.

The idea is MegaBlocks' (Gale et al. 2022): the launch covers the most blocks there can be, and each
program finds out which matrix its block of rows belongs to. The host never waits for the counts.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# M rows, I inputs, O outputs, X matrices
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.kernels.triton.language import check, on_device_of, tl, triton
from fivefold.kernels.triton.matmul import product
from fivefold.kernels.triton.varlen import block_count, sequence_of_block

# Rows of an expert are fewer than of a whole batch: half-empty tiles of 128 would be the rule.
ROWS, COLUMNS = 64, 128
DEPTH_BYTES = 128
WARPS, STAGES = 4, 3
OUTER_ROWS, OUTER_COLUMNS = 64, 128


def grouped_multiply(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M,I] times [X,O,I] transposed to [M,O]: the first counts[0] rows by weight[0], and so on.

    `counts` [X] integers on the device add up to M; a matrix may have no rows. Any strides.
    """
    check("grouped_multiply", x, weight)
    if x.shape[1] != weight.shape[2] or counts.shape != weight.shape[:1]:
        raise FivefoldError(
            f"grouped_multiply of {tuple(x.shape)}, {tuple(weight.shape)}, {tuple(counts.shape)}",
            "give [M,I], [X,O,I] and [X]",
        )
    (rows, depth), (matrices, columns, _) = x.shape, weight.shape
    y = x.new_empty(rows, columns)
    if y.numel():
        with on_device_of(x):
            grouped_multiply_kernel[
                (block_count(rows, matrices, ROWS), triton.cdiv(columns, COLUMNS))
            ](
                x, weight, y, _starts(counts), matrices, columns, depth, *x.stride(),
                *weight.stride(), ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH_BYTES // x.itemsize,
                num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
    return y


def grouped_outer(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Rows [M,O] and [M,I] to the sum of their outer products for each matrix: [X,O,I]."""
    check("grouped_outer", grad, x)
    if grad.shape[0] != x.shape[0]:
        raise FivefoldError(
            f"grouped_outer of {tuple(grad.shape)} and {tuple(x.shape)}",
            "give as many rows of each",
        )
    outputs, inputs, matrices = grad.shape[1], x.shape[1], counts.shape[0]
    total = x.new_empty(matrices, outputs, inputs)
    if total.numel():
        tiles = triton.cdiv(outputs, OUTER_ROWS), triton.cdiv(inputs, OUTER_COLUMNS)
        with on_device_of(x):
            grouped_outer_kernel[(tiles[0] * tiles[1], matrices)](
                grad, x, total, _starts(counts), outputs, inputs, *grad.stride(), *x.stride(),
                ROWS=OUTER_ROWS, COLUMNS=OUTER_COLUMNS, DEPTH=DEPTH_BYTES // x.itemsize,
                num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
    return total


def _starts(counts: Tensor) -> Tensor:
    """The first row of each matrix, and the end [X+1]; stays on the device."""
    return F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


@triton.jit
def grouped_multiply_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    starts: tl.tensor,
    matrices: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    x_row: tl.tensor,
    x_depth: tl.tensor,
    weight_matrix: tl.tensor,
    weight_column: tl.tensor,
    weight_depth: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One tile of one matrix's rows a program."""
    block = tl.program_id(0)
    matrix = sequence_of_block(starts, block, matrices, ROWS)
    begin = tl.load(starts + matrix)
    end = tl.load(starts + matrix + 1)
    first = begin + (block - begin // ROWS - matrix) * ROWS
    if first >= end:
        return
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    factor = weight + matrix.to(tl.int64) * weight_matrix + column * weight_column
    total = product(
        x + row * x_row, factor, row < end, column < columns,
        depth, x_depth, weight_depth, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    at = y + row[:, None] * columns + column[None, :]
    inside = (row < end)[:, None] & (column < columns)[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def grouped_outer_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    total: tl.tensor,
    starts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    grad_row: tl.tensor,
    grad_column: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One tile of one matrix a program: the sum runs over the matrix's rows, in order."""
    matrix = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(inputs, COLUMNS)
    output = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(starts + matrix).to(tl.int64)
    count = tl.load(starts + matrix + 1) - begin
    result = product(
        grad + begin * grad_row + output * grad_column, x + begin * x_row + column * x_column,
        output < outputs, column < inputs, count, grad_row, x_row, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    at = total + (matrix * outputs + output[:, None]) * inputs + column[None, :]
    inside = (output < outputs)[:, None] & (column < inputs)[None, :]
    tl.store(at, result.to(total.dtype.element_ty), mask=inside)
