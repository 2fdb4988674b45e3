"""A projection of a gated activation, as a feed-forward ends: `gated(gate, up) @ weight.T + bias`.

The product alone would keep its operand for the weight's gradient, as large as gate or up, which
are kept for the activation's own gradient anyway. Here backward computes it from them again: a
pass over memory instead of F numbers a token.
"""

from __future__ import annotations

# F feed-forward width, O outputs
from typing import Any

from torch import Tensor

from fivefold.kernels import operator
from fivefold.kernels.gated import GATED_BACKWARD, Activation, gated
from fivefold.kernels.linear import bias_gradient, input_gradient, linear, weight_gradient


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
) -> Tensor:
    """[..., F] twice, by a weight [O,F] and a bias [O]: [..., O] in gate's dtype.

    Raises `KernelError` for what `gated` does not take.
    """
    return _gated_linear(gate, up, weight, bias, activation)


def gated_linear_reference(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
) -> Tensor:
    """The same in two operators."""
    return linear(gated(gate, up, activation), weight, bias)


def _shapes(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    return gate.new_empty(*gate.shape[:-1], weight.shape[0])


_gated_linear = operator.define(
    "gated_linear(Tensor gate, Tensor up, Tensor weight, Tensor? bias, str activation) -> Tensor",
    gated_linear_reference,
    _shapes,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, weight, bias, ctx.activation = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(gate, up, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, weight = ctx.saved_tensors
    needs_gate, needs_up, needs_weight, needs_bias, _ = ctx.needs_input_grad
    of_weight = of_gate = of_up = None
    if needs_weight:
        of_weight = weight_gradient(gated(gate, up, ctx.activation), grad)
    of_bias = bias_gradient(grad) if ctx.has_bias and needs_bias else None
    if needs_gate or needs_up:
        inner = input_gradient(grad, weight)
        of_gate, of_up = GATED_BACKWARD(inner, gate, up, ctx.activation)
    return of_gate, of_up, of_weight, of_bias, None


operator.differentiate("gated_linear", _differentiate, _keep)
operator.count_as_product("gated_linear")
