"""Backward in two: for the inputs now, for the weights when there is time (Qi et al. 2023).

A `Projection`'s weight gradient is one product of its input and of its output's gradient, and nothing
waits for it. `WeightGradients` makes the projections of one module put these two aside;
`deliver` computes the products later and hands each to its parameter through autograd, so
that hooks after accumulation fire as they do in a plain backward, once for each parameter.
Everything else (norms, embedding, loss, stacked experts) has its weight gradients with the inputs'.
"""

from __future__ import annotations

# N rows, I inputs, O outputs
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.kernels.linear import bias_gradient, linear, weight_gradient
from fivefold.model.projection import Projection

Operands = tuple[Tensor, Tensor]  # input [..., I] and gradient of the output [..., O]
Aside = dict[Projection, list[Operands]]


class WeightGradients:
    """The postponed products of the projections inside `module`, by micro-batch.

    Forward and backward of a micro-batch run inside `postponing`; outside of it both are plain.
    Parameters that do not require a gradient get none.
    """

    def __init__(self, module: nn.Module) -> None:
        self.aside: Aside | None = None  # of the micro-batch that runs
        self._aside: dict[int, Aside] = {}
        self._projections = [m for m in module.modules() if isinstance(m, Projection)]
        self.attach()

    def attach(self) -> None:
        """Make the projections this object's, if another one has been made for them since."""
        for projection in self._projections:
            # On the instance, so that hooks around the call stay where they are.
            projection.forward = partial(_forward, self, projection)  # type: ignore[method-assign]
            # One operand that is put aside is smaller than what it could be made from.
            projection.remakes = False

    @contextmanager
    def postponing(self, microbatch: int) -> Iterator[None]:
        """Around the forward, and around the backward, which may run parts of the forward again."""
        self.aside = self._aside.setdefault(microbatch, {})
        try:
            yield
        finally:
            self.aside = None

    def deliver(self, microbatch: int) -> None:
        """Compute what was put aside and accumulate it."""
        for projection, operands in self._aside.pop(microbatch).items():
            _accumulate(projection.weight, [weight_gradient(x, grad) for x, grad in operands])
            if projection.added_bias is not None:
                _accumulate(projection.added_bias, [bias_gradient(grad) for _, grad in operands])

    def forget(self) -> None:
        """Drop what was put aside, after a batch that failed."""
        self._aside.clear()


def _accumulate(parameter: Tensor, gradients: list[Tensor]) -> None:
    """One accumulation, as autograd does where a parameter is used several times."""
    if parameter.requires_grad:
        total = gradients[0]
        for gradient in gradients[1:]:
            total = total + gradient
        parameter.backward(total)


def _forward(store: WeightGradients, projection: Projection, input: Tensor) -> Tensor:
    """The plain product, or that with constants and a node that puts the operands aside."""
    weight, bias = projection.weight, projection.added_bias
    # A frozen weight has no gradient to postpone, and where the input has none either, nothing but
    # the weight would bring backward here.
    if store.aside is None or not (input.requires_grad and weight.requires_grad):
        return linear(input, weight, bias)
    output = linear(input, weight.detach(), None if bias is None else bias.detach())
    return _Tap.apply(output, input.detach(), store.aside, projection)


class _Tap(torch.autograd.Function):
    """Hands output and gradient on; puts the operands aside as the gradient passes."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, aside: Aside, projection: Projection
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.aside, ctx.projection = aside, projection
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.aside.setdefault(ctx.projection, []).append((x, grads[0].detach()))
        return grads[0], None, None, None
