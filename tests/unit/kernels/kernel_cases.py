"""How far a result in some format may lie from the same in fp64, and the seeds of inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import settings
from torch import Tensor

# One run is every run: no deadline (two shared cores), no luck.
held = settings(deadline=None, derandomize=True, max_examples=40)

# Distance of 1 from the next number of each format.
STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_within(actual: Tensor, exact: Tensor, steps: float, terms: float = 0.0) -> None:
    """`actual` is off by at most `steps` rounding steps of its format.

    A step is of `exact`'s largest value, or of `terms` where larger values cancelled to it.
    """
    if not exact.numel():
        return
    allowed = steps * STEP[actual.dtype] * max(exact.abs().max().item(), terms)
    worst = (actual.double() - exact.double()).abs().max().item()
    assert worst <= allowed, f"off by {worst:.3g}, allowed {allowed:.3g}"


def assert_rounded_once(actual: Tensor, exact: Tensor) -> None:
    """`actual` is `exact` rounded to its format: no other rounding before, but for rare ties."""
    same = (actual == exact.to(actual.dtype)).float().mean().item()
    assert same > 0.99, f"only {same:.1%} are the nearest numbers"


def gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], upstream: Tensor
) -> tuple[Tensor, ...]:
    """(value, gradient of each input) of `function` under the upstream gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value.dtype))


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same numbers in fp64."""
    return tuple(t.double() for t in tensors)
