"""How an operator of this package becomes one that torch knows.

As a torch operator it is one opaque node to autograd, fake tensors, activation checkpointing and
torch.compile, with shapes known without computing. What computes is asked of `dispatch` inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "fivefold"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """The operator `torch.ops.fivefold.<name>` of a schema such as `name(Tensor x) -> Tensor`.

    `compute` takes real tensors on any device, `shapes` returns empty ones like its result.
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def differentiate(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Give the operator a backward pass, as `torch.library.register_autograd` asks for."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library
    )


def count_as_product(name: str) -> None:
    """Tell torch's counter of FLOPs that the operator multiplies, over its first argument's last dim."""

    @register_flop_formula(getattr(getattr(torch.ops, NAMESPACE), name))
    def flops(first: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
        return 2 * math.prod(out_shape) * first[-1]
