"""Gated activations: SwiGLU and GeGLU (Shazeer 2020), forward and backward in one pass each."""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# N rows, F feed-forward width
from typing import Literal

import torch
from torch import Tensor

from fivefold.kernels.triton.language import check, on_device_of, rows_of, tl, triton

Activation = Literal["silu", "gelu_tanh"]
COLUMNS_A_PROGRAM = 1024
GELU_CUBIC = tl.constexpr(0.044715)
GELU_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up [...,F], rounded once; the inputs may be halves of one packed tensor."""
    check("gated", gate, up)
    gates, ups = rows_of(gate), rows_of(up)
    y = torch.empty_like(gates, memory_format=torch.contiguous_format)
    if y.numel():
        with on_device_of(gate):
            gated_kernel[_grid(gates)](
                gates, ups, y, gates.stride(0), ups.stride(0), gates.shape[1],
                ACTIVATION=activation, BLOCK=COLUMNS_A_PROGRAM,
            )  # fmt: skip
    return y.view(gate.shape)


def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up) [...,F]; the activation is computed again rather than kept."""
    check("gated_backward", grad, gate, up)
    grads, gates, ups = rows_of(grad), rows_of(gate), rows_of(up)
    d_gate, d_up = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gates, ups)
    )
    if grads.numel():
        with on_device_of(gate):
            gated_backward_kernel[_grid(gates)](
                grads, gates, ups, d_gate, d_up,
                grads.stride(0), gates.stride(0), ups.stride(0), gates.shape[1],
                ACTIVATION=activation, BLOCK=COLUMNS_A_PROGRAM,
            )  # fmt: skip
    return d_gate.view(gate.shape), d_up.view(up.shape)


def _grid(rows: Tensor) -> tuple[int, int]:
    return rows.shape[0], triton.cdiv(rows.shape[1], COLUMNS_A_PROGRAM)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """By the logistic function, which saturates without overflow. Off by at most 1e-7."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _activate(gate: tl.tensor, ACTIVATION: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Value and slope."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    else:  # noqa: RET505 (a branch of constants: the compiler would read on)
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # Tensors before constants: the interpreter's product of a constant is a constant.
        square = gate * gate
        inner = tanh(gate * (square * GELU_CUBIC + 1) * GELU_SCALE)
        slope = (square * (3 * GELU_CUBIC) + 1) * GELU_SCALE
        half = 0.5 * (1 + inner)
        return gate * half, half + 0.5 * gate * (1 - inner * inner) * slope


@triton.jit
def gated_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A piece of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activate(g, ACTIVATION)
    tl.store(y + row * size + columns, (value * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    d_gate: tl.tensor,
    d_up: tl.tensor,
    grad_stride: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Both gradients of a piece of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    slope = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value, rise = _activate(g, ACTIVATION)
    at = row * size + columns
    tl.store(d_gate + at, (slope * u * rise).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (slope * value).to(d_up.dtype.element_ty), mask=inside)
