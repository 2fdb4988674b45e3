"""Activation checkpointing (Chen et al. 2016): keep less in forward, compute it again in backward."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

from fivefold.kernels import flash_attention  # noqa: F401  makes the operator
from fivefold.kernels.grouped_linear import GROUPED_MULTIPLY
from fivefold.kernels.multiply import MULTIPLY
from fivefold.model.projection import Projection

# Results of these are kept under `selective`: dear to compute, and everything else is cheap.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    MULTIPLY,
    GROUPED_MULTIPLY,
    torch.ops.fivefold.flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def recompute_blocks(
    layers: nn.ModuleList, mode: Literal["none", "selective", "full"], every: int
) -> None:
    """Wrap every `every`-th block of `layers`, in place."""
    if mode == "none":
        return
    extra: dict[str, Any] = {}
    if mode == "selective":
        extra["context_fn"] = _contexts
    for index in range(0, len(layers), every):
        for module in layers[index].modules():
            if isinstance(module, Projection):
                module.remakes = False  # the second forward makes all operands, and in time
        # No random numbers are drawn in a block, so there is no state to keep for the second pass.
        layers[index] = checkpoint_wrapper(layers[index], preserve_rng_state=False, **extra)


class _Again(_CachedTorchDispatchMode):
    """The second forward: what was kept is taken, all else is computed.

    Torch's own insists that both passes run the same operators, but FSDP has other things to do in
    backward than in forward when it wraps a part of a block (experts).
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in KEPT:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _contexts() -> tuple[_CachingTorchDispatchMode, _Again]:
    """Of the first forward and of the second."""
    first, second = create_selective_checkpoint_contexts(_policy)
    return first, _Again(_policy, second.storage)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
