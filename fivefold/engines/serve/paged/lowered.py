"""A decoder's step in one native call: the modules' kernels without Python between them.

It is built from a loaded decoder, covers the dense families where the native kernels compute, and
gives the modules' own bits (in deterministic mode: elsewhere those may multiply in another order).
Matrices are packed beside the decoder's, queries, keys and values as one and gate and up as one;
norms and biases are copied in fp32. So it is made anew when weights change.
"""

from __future__ import annotations

# N tokens, D hidden, H query heads, K key/value heads, E head_dim, F feed-forward, O outputs, I inputs
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fivefold.engines.serve.coverage import why_not_lowered
from fivefold.engines.serve.paged.batch import PagedBatch
from fivefold.engines.serve.paged.cache import PagedCache
from fivefold.kernels import dispatch
from fivefold.kernels.cpu.decoder_step import DecoderStep, LayerOperands, Numbers, Product
from fivefold.kernels.cpu.gated import ACTIVATIONS
from fivefold.kernels.packed_linear import PackedWeight, pack_int8, pack_weight
from fivefold.model.attention import Attention
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Block, Decoder
from fivefold.model.feed_forward import FeedForward
from fivefold.model.norm import RMSNorm
from fivefold.model.projection import Projection

WeightFormat = Literal["own", "int8"]


def why_no_native_step(decoder: Decoder) -> str | None:
    """Why steps of this decoder walk its modules; None: they need not."""
    weight = decoder.head_weight()
    choice = dispatch.choose("packed_linear", weight.device.type, weight.dtype)
    if choice.implementation != "native":
        return choice.why
    return why_not_lowered(decoder)


class LoweredDecoder:
    """Runs the blocks of one decoder. Its head is packed as well, in the decoder's own place."""

    def __init__(self, decoder: Decoder, weights: WeightFormat = "own") -> None:
        self.decoder = decoder
        self._weights = weights
        self._step: DecoderStep | None = None
        self.repack()

    @torch.no_grad()
    def repack(self) -> None:
        """Take the decoder's weights as they are now."""
        decoder, config = self.decoder, self.decoder.config
        self.release()  # before as much memory is taken again
        ropes = list(dict.fromkeys(config.ropes))
        layers = [
            self._layer(cast(Block, block), config, i, ropes.index(config.ropes[i]))
            for i, block in enumerate(decoder.layers)
        ]
        self._step = DecoderStep(_numbers(decoder), layers, _norm(decoder.norm))
        decoder.packed_head = self._pack(decoder.head_weight())

    def release(self) -> None:
        """Give the memory of the packed weights back, until `repack`."""
        self._step = None
        self.decoder.packed_head = None

    def states(self, batch: PagedBatch, cache: PagedCache) -> Tensor:
        """Hidden states [N,D] after the final norm; keys and values are written on the way.

        They lie in memory that the next call takes again.
        """
        assert self._step is not None, "weights were released"
        tables = self.decoder.rope_tables(batch.positions.unsqueeze(0))
        return self._step(
            self.decoder.embed(batch.tokens), cache.all_keys, cache.all_values, batch.slots,
            batch.block_table, batch.query_starts, batch.lengths, list(tables.values()),
        )  # fmt: skip

    def _layer(self, block: Block, config: ModelConfig, index: int, rope: int) -> LayerOperands:
        attention = cast(Attention, block.attention)
        feed_forward = cast(FeedForward, block.feed_forward)
        return LayerOperands(
            attention_norm=_norm(block.attention_norm),
            feed_forward_norm=_norm(block.feed_forward_norm),
            query_norm=_norm_if_any(attention.query_norm),
            key_norm=_norm_if_any(attention.key_norm),
            attention_post_norm=_norm_if_any(block.attention_post_norm),
            feed_forward_post_norm=_norm_if_any(block.feed_forward_post_norm),
            heads=self._product(attention.query, attention.key, attention.value),
            output=self._product(attention.output),
            gate_up=self._product(feed_forward.gate, feed_forward.up),
            down=self._product(feed_forward.down),
            window=config.windows[index] or 0,
            rope=rope,
        )

    def _product(self, *projections: Projection) -> Product:
        """Projections of one input as one product [sum of O, I]."""
        packed = self._pack(torch.cat([p.weight for p in projections]))
        biases = [p.bias.float() for p in projections if p.bias is not None]
        return Product(packed.data, packed.scale, torch.cat(biases) if biases else None)

    def _pack(self, weight: Tensor) -> PackedWeight:
        return pack_int8(weight, weight.dtype) if self._weights == "int8" else pack_weight(weight)


def _numbers(decoder: Decoder) -> Numbers:
    config = decoder.config
    return Numbers(
        dtype=decoder.head_weight().dtype,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inner=config.intermediate_size,
        activation=ACTIVATIONS[config.activation],
        eps=config.norm_eps,
        norm_offset=config.norm_offset,
        scale=config.scale,
        softcap=config.attention_softcap or 0.0,
    )


def _norm(norm: RMSNorm) -> Tensor:
    return norm.weight.detach().float().clone()


def _norm_if_any(module: nn.Module) -> Tensor | None:
    return _norm(module) if isinstance(module, RMSNorm) else None
