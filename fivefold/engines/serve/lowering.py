"""The decode step of a decoder, packed: fewer and larger operators, the same parameters.

One token a row costs so little arithmetic that a CPU spends much of an eager step in Python and
in operator dispatch. The lowered step walks plain records instead of modules, multiplies
query/key/value as one matrix and gate/up as another, and rotates queries and keys together. The
packed matrices take the place of the modules' own: those parameters become views of them, so
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
from torch import Tensor, nn

from fivefold.engines.serve.decode_view import DecodeView
from fivefold.engines.serve.packing import pack
from fivefold.kernels.linear import linear
from fivefold.model.cache import KVCache
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Block, Decoder
from fivefold.model.norm import RMSNorm
from fivefold.model.projection import Projection

COVERED = (
    Decoder, Block, RMSNorm, Projection, nn.Identity, nn.Embedding, nn.Linear, nn.ModuleList,
)  # fmt: skip


def lower(decoder: Decoder) -> LoweredDecoder | None:
    """The packed form, or None where only the modules know what to do.

    Not covered: modules with hooks or of other types (adapters, FSDP), parameters that are no
    plain tensors (DTensor, meta), and rope whose angles depend on the length (`dynamic`).
    """
    for module in decoder.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        own = type(module).__module__ in ("fivefold.model.attention", "fivefold.model.feed_forward")
        if not own and type(module) not in COVERED:
            return None
    for parameter in decoder.parameters():
        if type(parameter.data) is not Tensor or parameter.is_meta:
            return None
    if any(rope.kind == "dynamic" for rope in decoder.config.ropes):
        return None
    return LoweredDecoder(decoder)


class LoweredDecoder:
    """One token for every row of a cache. Shares the matrices of the decoder it was built from."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.norm = LoweredNorm.of(decoder.norm)
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
class LoweredNorm:
    """RMSNorm with its weight ready: fp32, offset added."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, norm: RMSNorm) -> LoweredNorm:
        """The norm with its weight as it is now."""
        return cls(norm.weight.detach().float() + norm.offset, norm.eps)

    @classmethod
    def of_optional(cls, norm: nn.Module) -> LoweredNorm | None:
        """None for an absent norm, which is an identity."""
        return cls.of(norm) if isinstance(norm, RMSNorm) else None

    def __call__(self, x: Tensor) -> Tensor:
        """[...,D] to the same, computed in fp32 and rounded once."""
        shape = self.weight.shape
        if x.dtype == torch.float32:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.rms_norm(x.float(), shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LoweredBlock:
    """One layer. The first dim of every tensor in a step is the batch; there is no sequence dim."""

    index: int
    config: ModelConfig
    attention_norm: LoweredNorm
    query_key_value: tuple[Tensor, Tensor | None]
    query_norm: LoweredNorm | None
    key_norm: LoweredNorm | None
    output: tuple[Tensor, Tensor | None]
    attention_post_norm: LoweredNorm | None
    feed_forward_norm: LoweredNorm
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    feed_forward_post_norm: LoweredNorm | None

    @classmethod
    def of(cls, block: Block, config: ModelConfig, index: int) -> LoweredBlock:
        """Pack one block's projections."""
        attention, feed_forward = block.attention, block.feed_forward
        return cls(
            index=index,
            config=config,
            attention_norm=LoweredNorm.of(block.attention_norm),
            query_key_value=pack(attention.query, attention.key, attention.value),
            query_norm=LoweredNorm.of_optional(attention.query_norm),
            key_norm=LoweredNorm.of_optional(attention.key_norm),
            output=pack(attention.output),
            attention_post_norm=LoweredNorm.of_optional(block.attention_post_norm),
            feed_forward_norm=LoweredNorm.of(block.feed_forward_norm),
            gate_up=pack(feed_forward.gate, feed_forward.up),
            down=pack(feed_forward.down),
            feed_forward_post_norm=LoweredNorm.of_optional(block.feed_forward_post_norm),
        )

    def step(self, hidden: Tensor, view: DecodeView) -> Tensor:
        """[B,D] -> [B,D]."""
        attended = self._attend(self.attention_norm(hidden), view)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        hidden = attended.add_(hidden)
        fed = self._feed_forward(self.feed_forward_norm(hidden))
        if self.feed_forward_post_norm is not None:
            fed = self.feed_forward_post_norm(fed)
        return fed.add_(hidden)

    def _attend(self, x: Tensor, view: DecodeView) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        packed = linear(x, *self.query_key_value).view(x.shape[0], -1, config.head_dim)
        turned, value = packed.split((heads + kv_heads, kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = turned.split((heads, kv_heads), dim=1)
            turned = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        turned = view.rotate(turned, config.ropes[self.index])
        query, key = turned.split((heads, kv_heads), dim=1)
        attended = view.attend(self.index, query, key, value, config)
        return linear(attended.flatten(1), *self.output)

    def _feed_forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, *self.gate_up).chunk(2, dim=-1)
        if self.config.activation == "silu":
            return linear(F.silu(gate).mul_(up), *self.down)
        return linear(F.gelu(gate, approximate="tanh").mul_(up), *self.down)
