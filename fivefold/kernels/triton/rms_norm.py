"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone or with the residual sum before it.

A program holds a whole row in registers, so the row is read once. The sum over D is one tree whose
shape D alone fixes.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# N rows, D normalised dimension, P programs of the backward pass
import torch
from torch import Tensor

from fivefold.kernels.triton.language import aligned, check, on_device_of, rows_of, tl, triton

# Rows whose share of the weight's gradient one program adds up. A constant: were it to follow the
# number of processors, the order of the sum would too.
ROWS_A_PROGRAM = 16
SUM_ROWS = 16
SUM_COLUMNS = 128


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """x [...,D] / rms(x) * (weight [D] + offset): (y [...,D] in x's dtype, 1 / rms [N] fp32)."""
    check("rms_norm", x, weight)
    rows = rows_of(x)
    count, size = rows.shape
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    inverse = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        with on_device_of(x):
            norm_kernel[(count,)](
                rows, aligned(weight), y, inverse, rows.stride(0), size, eps, offset, **_row(size)
            )
    return y.view(x.shape), inverse


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(norm(total), total = x + residual, 1 / rms [N] fp32); total is rounded before its norm."""
    check("rms_norm_residual", x, residual, weight)
    rows, others = rows_of(x), rows_of(residual)
    count, size = rows.shape
    y, total = (torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(2))
    inverse = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        with on_device_of(x):
            residual_norm_kernel[(count,)](
                rows, others, aligned(weight), y, total, inverse,
                rows.stride(0), others.stride(0), size, eps, offset, **_row(size),
            )  # fmt: skip
    return y.view(x.shape), total.view(x.shape), inverse


def rms_norm_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Gradients of x [...,D] and of weight [D], each in its tensor's dtype; x is what was normalised.

    The weight's gradient is summed in fp32: 16 rows a program, then over programs, in order.
    """
    check("rms_norm_backward", grad_y, x, weight)
    grads, rows = rows_of(grad_y), rows_of(x)
    count, size = rows.shape
    programs = triton.cdiv(count, ROWS_A_PROGRAM)
    grad_x = torch.empty_like(rows, memory_format=torch.contiguous_format)
    partial = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    with on_device_of(x):
        if programs:
            norm_backward_kernel[(programs,)](
                grads, rows, aligned(weight), inverse, grad_x, partial,
                grads.stride(0), rows.stride(0), count, size, offset,
                ROWS=ROWS_A_PROGRAM, **_row(size),
            )  # fmt: skip
        sum_rows_kernel[(triton.cdiv(size, SUM_COLUMNS),)](
            partial, grad_weight, programs, size, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS
        )
    return grad_x.view(x.shape), grad_weight


def _row(size: int) -> dict[str, int]:
    """The block that holds a row, and warps for it: 16 numbers a thread, up to 16 warps."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _normalise(
    x: tl.tensor,
    weight: tl.tensor,
    columns: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """A row in fp32, zero beyond `size`, normalised; and 1 / rms."""
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    gain = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32) + offset
    return x * inverse * gain, inverse


@triton.jit
def norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    inverse: tl.tensor,
    x_stride: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row a program. Row numbers are 64 bits wide: N * D passes 2^31 in ordinary batches."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    normal, scale = _normalise(values, weight, columns, size, eps, offset)
    tl.store(y + row * size + columns, normal.to(y.dtype.element_ty), mask=inside)
    tl.store(inverse + row, scale)


@triton.jit
def residual_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    inverse: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The same of x + residual, rounded as it is stored, so that backward sees what forward saw."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    rounded = (values + others.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row * size + columns, rounded, mask=inside)
    normal, scale = _normalise(rounded.to(tl.float32), weight, columns, size, eps, offset)
    tl.store(y + row * size + columns, normal.to(y.dtype.element_ty), mask=inside)
    tl.store(inverse + row, scale)


@triton.jit
def norm_backward_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    inverse: tl.tensor,
    grad_x: tl.tensor,
    partial: tl.tensor,
    grad_stride: tl.tensor,
    x_stride: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    offset: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Gradients of ROWS rows, and these rows' share [D] of the weight's gradient."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    share = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program * ROWS, tl.minimum(program * ROWS + ROWS, count)):
        values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row)
        normal = values * scale
        scaled = slope * gain
        # Scaling a row does not change its norm: what lies along the row is taken out.
        along = tl.sum(scaled * normal, axis=0) / size
        result = (scaled - normal * along) * scale
        tl.store(grad_x + row * size + columns, result.to(grad_x.dtype.element_ty), mask=inside)
        share += slope * normal
    tl.store(partial + program * size + columns, share, mask=inside)


@triton.jit
def sum_rows_kernel(
    partial: tl.tensor,
    total: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Sum of [P,D] over P: ROWS running sums of every ROWS-th row, added up at the end."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows < count)[:, None] & (columns < size)[None, :]
        at = partial + rows[:, None] * size + columns[None, :]
        sums += tl.load(at, mask=inside, other=0.0)
    tl.store(total + columns, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=columns < size)
