"""How much of a decoder one token is multiplied by, counted from its own modules."""

from __future__ import annotations

# X experts, F an expert's inner width, D hidden
from torch import nn

from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder


def active_elements(config: ModelConfig) -> tuple[int, ...]:
    """Elements of each layer's matrices that a token meets.

    Of stacked experts [X,F,D] a token passes through as many as it is routed to.
    """
    return tuple(_met(layer, config) for layer in Decoder(config, device="meta").layers)


def _met(layer: nn.Module, config: ModelConfig) -> int:
    total = 0
    for name, parameter in layer.named_parameters():
        if parameter.ndim < 2:
            continue
        elements = parameter.numel()
        if ".experts." in f".{name}":
            assert config.moe is not None
            elements = elements // config.moe.experts * config.moe.top_k
        total += elements
    return total
