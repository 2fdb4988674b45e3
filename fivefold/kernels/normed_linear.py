"""A projection of a normalised tensor that backward makes again rather than keeps.

A product keeps its operand for the weight's gradient. What `rms_norm` says is as large as what it
is told, which is kept for the norm's own gradient and, a residual, by others too. So a normalised
tensor carries its recipe, and the product keeps that: one pass over memory in backward instead of
D numbers a token.
"""

from __future__ import annotations

# D hidden, O outputs
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fivefold.kernels import operator
from fivefold.kernels.linear import bias_gradient, input_gradient, linear, weight_gradient
from fivefold.kernels.rms_norm import rms_norm

ATTRIBUTE = "_fivefold_recipe"


@dataclass(frozen=True)
class Recipe:
    """rms_norm(x, weight, eps, offset): the same bits whenever it is computed."""

    x: Tensor
    weight: Tensor
    eps: float
    offset: float


def carry(normed: Tensor, recipe: Recipe) -> Tensor:
    """`normed`, which from here on says how it was made. What is computed from it does not."""
    setattr(normed, ATTRIBUTE, recipe)
    return normed


def recipe_of(x: Tensor) -> Recipe | None:
    """How `x` was made, if it is a normalised tensor itself."""
    found: Recipe | None = getattr(x, ATTRIBUTE, None)
    return found


def normed_linear(normed: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """[..., D] by a weight [O,D] and a bias [O]: [..., O], as `linear` gives it.

    Gradients go to `normed`, and from there through the norm, as ever.
    """
    x, scale = recipe.x.detach(), recipe.weight.detach()
    return _normed_linear(normed, weight, bias, x, scale, recipe.eps, recipe.offset)


def _forward(
    normed: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, scale: Tensor, *_: float
) -> Tensor:
    return linear(normed, weight, bias)


def _shapes(normed: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return normed.new_empty(*normed.shape[:-1], weight.shape[0])


_normed_linear = operator.define(
    "normed_linear(Tensor normed, Tensor weight, Tensor? bias, Tensor x, Tensor scale, float eps,"
    " float offset) -> Tensor",
    _forward,
    _shapes,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, bias, x, scale, ctx.eps, ctx.offset = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(weight, x, scale)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, x, scale = ctx.saved_tensors
    needs_normed, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    of_weight = None
    if needs_weight:
        of_weight = weight_gradient(rms_norm(x, scale, ctx.eps, ctx.offset), grad)
    of_bias = bias_gradient(grad) if ctx.has_bias and needs_bias else None
    of_normed = input_gradient(grad, weight) if needs_normed else None
    return of_normed, of_weight, of_bias, None, None, None, None


operator.differentiate("normed_linear", _differentiate, _keep)
operator.count_as_product("normed_linear")
