"""Binding of gated.cpp."""

from __future__ import annotations

# N rows, F feed-forward width
from ctypes import c_int, c_long, c_void_p

import torch
from torch import Tensor

from fivefold.kernels.cpu.library import code, function, pointer
from fivefold.kernels.cpu.rows import check_alike, rows_of

FORWARD = (
    c_int, c_int, c_long, c_long, c_void_p, c_long, c_void_p, c_long, c_void_p, c_int,
)  # fmt: skip
BACKWARD = (
    c_int, c_int, c_long, c_long, c_void_p, c_long, c_void_p, c_long, c_void_p, c_long, c_void_p,
    c_void_p, c_int,
)  # fmt: skip
# As `enum Activation` in gated.cpp.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up [...,F]; rows may be halves of one packed tensor's."""
    check_alike("gated", gate, up=up)
    gates, ups = rows_of(gate), rows_of(up)
    y = gate.new_empty(gate.shape)
    function("fivefold_gated", *FORWARD)(
        code(gate), ACTIVATIONS[activation], *gates.shape, pointer(gates), gates.stride(0),
        pointer(ups), ups.stride(0), pointer(y), torch.get_num_threads(),
    )  # fmt: skip
    return y


def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and of up [...,F]."""
    check_alike("gated_backward", gate, up=up, grad=grad)
    grads, gates, ups = rows_of(grad), rows_of(gate), rows_of(up)
    grad_gate, grad_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    function("fivefold_gated_backward", *BACKWARD)(
        code(gate), ACTIVATIONS[activation], *gates.shape, pointer(grads), grads.stride(0),
        pointer(gates), gates.stride(0), pointer(ups), ups.stride(0), pointer(grad_gate),
        pointer(grad_up), torch.get_num_threads(),
    )  # fmt: skip
    return grad_gate, grad_up
