"""Operations that a model needs, for utilisations: the convention of `observe.flops`."""

from __future__ import annotations

from functools import lru_cache

from fivefold.observe.flops import (
    DecoderShape,
    hardware_flops_per_token,
    training_flops_per_token,
)
from fivefold.plan.memory.parameters import layer_weights
from fivefold.plan.shape import ModelShape
from fivefold.plan.workload import Recompute


@lru_cache(maxsize=1024)
def training_flops(shape: ModelShape, sequence: int) -> float:
    """Of a token, forward and backward."""
    return training_flops_per_token(decoder_shape(shape), sequence)


@lru_cache(maxsize=1024)
def hardware_flops(shape: ModelShape, sequence: int, recompute: Recompute) -> float:
    """The same with what is computed again."""
    return hardware_flops_per_token(decoder_shape(shape), sequence, recompute)


@lru_cache(maxsize=256)
def decoder_shape(shape: ModelShape) -> DecoderShape:
    """A shape as `observe.flops` reads it, with the elements of each layer that a token meets."""
    config = shape.config
    return DecoderShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        windows=config.windows,
        value_dim=config.value_dim,
        elements=tuple(_met(shape, config.is_sparse(i)) for i in range(config.num_layers)),
    )


@lru_cache(maxsize=256)
def _met(shape: ModelShape, sparse: bool) -> int:
    moe, total = shape.config.moe, 0
    for weight in layer_weights(shape, sparse):
        if weight.matrix:
            chosen = moe is not None and weight.expert
            total += (
                weight.elements * moe.top_k // moe.experts if chosen and moe else weight.elements
            )
    return total
