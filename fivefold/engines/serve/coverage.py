"""Which decoders may be lowered: those that are what their configuration says, and no more."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from fivefold.model.attention import Attention
from fivefold.model.decoder import Block, Decoder
from fivefold.model.feed_forward import FeedForward
from fivefold.model.norm import RMSNorm
from fivefold.model.projection import Projection

DENSE: Collection[type[nn.Module]] = (
    Decoder, Block, Attention, FeedForward, RMSNorm, Projection, nn.Identity, nn.Embedding,
    nn.ModuleList,
)  # fmt: skip


def why_not_lowered(decoder: Decoder) -> str | None:
    """What only the modules of this decoder know how to do; None: nothing.

    Not covered: modules with hooks or of other types (adapters, experts, latent attention, FSDP),
    and parameters that are no plain tensors (DTensor, meta).
    """
    for name, module in decoder.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the decoder'} has hooks"
        if type(module) not in DENSE:
            return f"{name} is a {type(module).__name__}"
    for name, parameter in decoder.named_parameters():
        if type(parameter.data) is not Tensor or parameter.is_meta:
            return f"{name} is no plain tensor"
    return None
