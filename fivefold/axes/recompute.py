"""Activation checkpointing (Chen et al. 2016): keep less in forward, compute it again in backward."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fivefold.kernels import flash_attention  # noqa: F401  makes the operator
from fivefold.kernels.grouped_linear import GROUPED_MULTIPLY
from fivefold.kernels.multiply import MULTIPLY

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
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for index in range(0, len(layers), every):
        # No random numbers are drawn in a block, so there is no state to keep for the second pass.
        layers[index] = checkpoint_wrapper(layers[index], preserve_rng_state=False, **extra)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
