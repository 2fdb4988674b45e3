"""Gated activations: SwiGLU and GeGLU (Shazeer 2020)."""

from __future__ import annotations

# F feed-forward width
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]
GELU_CUBIC = 0.044715
GELU_SCALE = math.sqrt(2 / math.pi)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, elementwise; [..., F] each."""
    if not torch.is_grad_enabled():
        return _Gated.forward(gate, up, activation)
    return _Gated.apply(gate, up, activation)


def gated_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The same by ordinary differentiable operators."""
    return _activate(gate, activation) * up


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def _slope(gate: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        sigmoid = torch.sigmoid(gate)
        return sigmoid * (1 + gate * (1 - sigmoid))
    inner = torch.tanh(GELU_SCALE * (gate + GELU_CUBIC * gate**3))
    slope = GELU_SCALE * (1 + 3 * GELU_CUBIC * gate.square())
    return 0.5 * (1 + inner) + 0.5 * gate * (1 - inner.square()) * slope


class _Gated(torch.autograd.Function):
    """Computes the activation again in backward rather than keep it."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return _activate(gate, activation).mul_(up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gate, up, ctx.activation = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad = grads[0]
        grad_up = _activate(gate, ctx.activation).mul_(grad)
        wide = gate if gate.dtype == torch.float64 else gate.float()
        grad_gate = _slope(wide, ctx.activation).mul_(up).mul_(grad).to(gate.dtype)
        return grad_gate, grad_up, None
