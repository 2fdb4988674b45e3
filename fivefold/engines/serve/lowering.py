"""The decode step of a decoder, packed: fewer and larger operators, the same parameters.

One token a row costs so little arithmetic that a CPU spends much of an eager step in Python and
in operator dispatch. The lowered step walks plain records instead of modules, multiplies
query/key/value as one matrix and gate/up as another, rotates queries and keys together, and adds
the residual inside a product. The packed matrices take the place of the modules' own: those parameters become views of them, so
memory does not grow and a change to a matrix is a change here. Norm weights are copied (in
fp32, with the family's offset): lower again after changing those.

It is no second model: it is built from a loaded decoder, `lower` returns None for what it does
not cover, and tests hold it to the modules.
"""

# B batch, D hidden, H query heads, K key/value heads, E head_dim, F feed-forward, T held tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.engines.serve.coverage import why_not_lowered
from fivefold.engines.serve.decode_view import DecodeView
from fivefold.engines.serve.lowered_parts import LoweredLinear, LoweredNorm
from fivefold.engines.serve.packing import pack
from fivefold.model.attention import Attention
from fivefold.model.cache import KVCache
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Block, Decoder
from fivefold.model.feed_forward import FeedForward
from fivefold.model.projection import Projection


def lower(decoder: Decoder) -> LoweredDecoder | None:
    """The packed form, or None where only the modules know what to do.

    Beside what `coverage` leaves out, rope whose angles depend on the length (`dynamic`).
    """
    if why_not_lowered(decoder) is not None:
        return None
    if any(rope.kind == "dynamic" for rope in decoder.config.ropes):
        return None
    return LoweredDecoder(decoder)


class LoweredDecoder:
    """One token for every row of a cache. Shares the matrices of the decoder it was built from."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.norm = LoweredNorm(decoder.norm)
        self.layers = [
            LoweredBlock.of(cast(Block, block), decoder.config, index)
            for index, block in enumerate(decoder.layers)
        ]

    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """[B] next token ids -> [B,V] fp32 logits; writes each row's key and value.

        Call `cache.advance` afterwards, as after a pass through the modules.
        """
        config = self.decoder.config
        hidden = F.embedding(tokens, self.decoder.embedding.weight)
        if config.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(config.embedding_scale, dtype=hidden.dtype)
        view = DecodeView(cache, self.decoder)
        for layer in self.layers:
            hidden = layer.step(hidden, view)
        return self.decoder.logits(self.norm(hidden))


@dataclass(frozen=True, slots=True)
class LoweredBlock:
    """One layer. The first dim of every tensor in a step is the batch; there is no sequence dim."""

    index: int
    config: ModelConfig
    attention_norm: LoweredNorm
    query_key_value: LoweredLinear
    query_norm: LoweredNorm | None
    key_norm: LoweredNorm | None
    output: LoweredLinear
    attention_post_norm: LoweredNorm | None
    feed_forward_norm: LoweredNorm
    gate_up: LoweredLinear
    down: LoweredLinear
    feed_forward_post_norm: LoweredNorm | None

    @classmethod
    def of(cls, block: Block, config: ModelConfig, index: int) -> LoweredBlock:
        """Pack one block's projections."""
        attention, feed_forward = block.attention, block.feed_forward
        assert isinstance(attention, Attention) and isinstance(feed_forward, FeedForward)
        return cls(
            index=index,
            config=config,
            attention_norm=LoweredNorm(block.attention_norm),
            query_key_value=packed(attention.query, attention.key, attention.value),
            query_norm=LoweredNorm.of(attention.query_norm),
            key_norm=LoweredNorm.of(attention.key_norm),
            output=packed(attention.output),
            attention_post_norm=LoweredNorm.of(block.attention_post_norm),
            feed_forward_norm=LoweredNorm(block.feed_forward_norm),
            gate_up=packed(feed_forward.gate, feed_forward.up),
            down=packed(feed_forward.down),
            feed_forward_post_norm=LoweredNorm.of(block.feed_forward_post_norm),
        )

    def step(self, hidden: Tensor, view: DecodeView) -> Tensor:
        """[B,D] -> [B,D]."""
        config = self.config
        attended = self._attend(self.attention_norm(hidden), view)
        if self.attention_post_norm is None:
            hidden = self.output(attended, hidden)
        else:
            hidden = self.attention_post_norm(self.output(attended)).add_(hidden)
        gate, up = self.gate_up(self.feed_forward_norm(hidden)).chunk(2, dim=-1)
        silu = config.activation == "silu"
        inner = (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")).mul_(up)
        if self.feed_forward_post_norm is None:
            return self.down(inner, hidden)
        return self.feed_forward_post_norm(self.down(inner)).add_(hidden)

    def _attend(self, x: Tensor, view: DecodeView) -> Tensor:
        """[B,D] -> [B,H*E], before the output projection."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        both = self.query_key_value(x).view(x.shape[0], -1, config.head_dim)
        turned, value = both.split((heads + kv_heads, kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = turned.split((heads, kv_heads), dim=1)
            turned = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        turned = view.rotate(turned, config.ropes[self.index])
        query, key = turned.split((heads, kv_heads), dim=1)
        return view.attend(self.index, query, key, value, config).flatten(1)


def packed(*projections: Projection) -> LoweredLinear:
    """Several projections of one input as one product."""
    return LoweredLinear(*pack(*projections))
