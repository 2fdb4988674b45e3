"""Gated activations: SwiGLU and GeGLU (Shazeer 2020).

Backward computes the activation again rather than keep it.
"""

from __future__ import annotations

# F feed-forward width
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import dispatch, operator
from fivefold.kernels.cpu import gated as native
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.cpu.rows import check_alike

Activation = Literal["silu", "gelu_tanh"]
GELU_CUBIC = 0.044715
GELU_SCALE = math.sqrt(2 / math.pi)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, elementwise; [..., F] each.

    Raises `KernelError` for other activations, or where gate and up differ in shape or format.
    """
    return _gated(gate, up, activation)


def gated_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The same by ordinary differentiable operators."""
    return _activate(gate, activation) * up


def _activate(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def _slope(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        sigmoid = torch.sigmoid(gate)
        return sigmoid * (1 + gate * (1 - sigmoid))
    inner = torch.tanh(GELU_SCALE * (gate + GELU_CUBIC * gate**3))
    slope = GELU_SCALE * (1 + 3 * GELU_CUBIC * gate.square())
    return 0.5 * (1 + inner) + 0.5 * gate * (1 - inner.square()) * slope


def _activate_alike(gate: Tensor, activation: str) -> Tensor:
    """By operators that round every element in one way.

    torch's silu and gelu on CPUs take other code for the last elements of a tensor, so that a
    token's bits depend on how many are beside it.
    """
    if activation == "silu":
        return gate / (1 + torch.exp(-gate))
    inner = torch.tanh(GELU_SCALE * (gate + GELU_CUBIC * gate * gate * gate))
    return 0.5 * gate * (1 + inner)


def _forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation not in native.ACTIVATIONS:
        raise KernelError(f"gated by {', '.join(native.ACTIVATIONS)}, not {activation!r}")
    check_alike("gated", gate, up=up)
    match dispatch.choose("gated", gate.device.type, gate.dtype).implementation:
        case "native":
            return native.gated(gate, up, activation)
        case "triton":
            from fivefold.kernels.triton import gated as gpu

            return gpu.gated(gate, up, activation)  # type: ignore[arg-type]
    if dispatch.is_deterministic() and gate.dtype != torch.float64:
        return (_activate_alike(gate.float(), activation) * up).to(gate.dtype).contiguous()
    return _activate(gate, activation).mul_(up).contiguous()


def _backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    match dispatch.choose("gated", gate.device.type, gate.dtype).implementation:
        case "native":
            return native.gated_backward(grad, gate, up, activation)
        case "triton":
            from fivefold.kernels.triton import gated as gpu

            return gpu.gated_backward(grad, gate, up, activation)  # type: ignore[arg-type]
    grad_up = _activate(gate, activation).mul_(grad)
    wide = gate if gate.dtype == torch.float64 else gate.float()
    grad_gate = _slope(wide, activation).mul_(up).mul_(grad).to(gate.dtype)
    return grad_gate.contiguous(), grad_up.contiguous()


_gated = operator.define(
    "gated(Tensor gate, Tensor up, str activation) -> Tensor",
    _forward,
    lambda gate, up, activation: gate.new_empty(gate.shape),
)
GATED_BACKWARD = operator.define(
    "gated_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    _backward,
    lambda grad, gate, up, activation: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *GATED_BACKWARD(grad, *ctx.saved_tensors, ctx.activation), None


operator.differentiate("gated", _differentiate, _keep)
