"""The decoder: one definition for every family, told apart by `ModelConfig` alone."""

from __future__ import annotations

# B batch, S sequence, D hidden, H query heads, K key/value heads, E head_dim, F feed-forward, V vocabulary
import hashlib
from typing import cast

import torch
from torch import Tensor, nn

from fivefold.kernels.linear import linear
from fivefold.kernels.packed_linear import PackedWeight, pack_weight
from fivefold.kernels.rope import rope_tables
from fivefold.model.attention import Attention
from fivefold.model.attention_backend import AttentionBackend
from fivefold.model.config import ModelConfig, RopeConfig
from fivefold.model.feed_forward import FeedForward
from fivefold.model.mla import LatentAttention
from fivefold.model.moe import MixtureOfExperts
from fivefold.model.norm import RMSNorm
from fivefold.model.projection import Projection, apply_packed

Tables = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and feed-forward, each around a residual; norms before, and for Gemma after."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention: nn.Module = (
            Attention(config, layer) if config.mla is None else LatentAttention(config, layer)
        )
        self.feed_forward_norm = RMSNorm(config)
        self.feed_forward: nn.Module = (
            MixtureOfExperts(config, layer) if config.is_sparse(layer) else FeedForward(config)
        )
        if config.post_norms:
            self.attention_post_norm: nn.Module = RMSNorm(config)
            self.feed_forward_post_norm: nn.Module = RMSNorm(config)
        else:
            self.attention_post_norm = nn.Identity()
            self.feed_forward_post_norm = nn.Identity()

    def forward(self, hidden: Tensor, tables: Tables, backend: AttentionBackend) -> Tensor:
        """[B,S,D] to [B,S,D]; `tables` are the rotary cosines and sines of the layer."""
        attended = self.attention(self.attention_norm(hidden), tables, backend)
        hidden = hidden + self.attention_post_norm(attended)
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self.feed_forward_post_norm(fed)


class Decoder(nn.Module):
    """Token embedding, blocks, final norm and head (the embedding's own weight when tied).

    Matrices have no defined values until `initialize`, or until weights are loaded.
    """

    packed_head: PackedWeight | None = None  # see `pack`

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.here = range(config.num_layers)  # blocks of this stage; see `stage`
        with _Defaults(device, dtype):
            table = config.vocab_size, config.hidden_size
            self.embedding = nn.Embedding(*table, _weight=torch.empty(table))
            self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
            self.norm = RMSNorm(config)
            self.head = (
                None
                if config.tie_embeddings
                else Projection(config.hidden_size, config.vocab_size, bias=False)
            )

    def forward(self, tokens: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Hidden states [B,S,D] after the final norm, for int64 tokens and positions [B,S]."""
        return self.norm(self.run(self.embed(tokens), positions, attention))

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [B,S] to [B,S,D]."""
        hidden = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            # Rounded to the model's format first, as Gemma was trained.
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=hidden.dtype)
        return hidden

    def run(self, hidden: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """[B,S,D] through the blocks that are here, in order."""
        tables = self.rope_tables(positions)
        for index in self.here:
            hidden = self.layers[index](hidden, tables[self.config.ropes[index]], attention)
        return hidden

    def stage(self, here: range) -> Decoder:
        """The blocks `here`, with the embedding before the first and the head after the last.

        It shares modules and parameter names with this decoder. A tied embedding is there twice:
        before the first block as a table, after the last one as the head.
        """
        part = Decoder.__new__(Decoder)
        nn.Module.__init__(part)
        part.config, part.here = self.config, here
        first, last = here.start == 0, here.stop == self.config.num_layers
        tied_head = last and self.config.tie_embeddings
        # What is not here is None, which nothing asks for at that place.
        part.embedding = cast(nn.Embedding, self.embedding if first or tied_head else None)
        part.layers = nn.ModuleList(
            layer if index in here else nn.Identity() for index, layer in enumerate(self.layers)
        )
        part.norm = cast(RMSNorm, self.norm if last else None)
        part.head = self.head if last else None
        return part

    def rope_tables(self, positions: Tensor) -> dict[RopeConfig, Tables]:
        """Cosines and sines for each distinct rotary setting among the layers."""
        config = self.config
        return {
            rope: rope_tables(positions, rope, config.rotary_dim, config.max_positions)
            for rope in dict.fromkeys(config.ropes)
        }

    def head_weight(self) -> Tensor:
        """The head's parameter [V,D]."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [...,V] in fp32 of hidden states [...,D]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.packed_head is not None and not torch.is_grad_enabled():
            scores = apply_packed(hidden, self.packed_head).to(wide)
        else:
            scores = linear(hidden, self.head_weight()).to(wide)
        cap = self.config.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def pack(self) -> None:
        """Repack matrices for inference, beside themselves; again when they change.

        Bits of the products stay. Where no kernel packs, nothing is held twice.
        """
        for module in self.modules():
            if isinstance(module, Projection):
                module.pack()
        self.packed_head = pack_weight(self.head_weight())

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill every parameter, each from a generator of its own name and `seed`.

        The value of a parameter so depends on nothing else: not on the order of the others, the
        device, or which of them a rank holds. Matrices are normal(0, initializer_range).
        """
        for name, parameter in self.named_parameters():
            value = initial_value(name, parameter.shape, self.config, seed)
            parameter.copy_(value.to(parameter.dtype))
        for buffer in self.buffers():  # the routers' biases
            buffer.zero_()


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The fp32 starting value of the parameter `name`."""
    if name.endswith("norm.weight"):
        return torch.full(shape, 1.0 - config.norm_offset)
    if name.endswith("bias"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)


class _Defaults:
    """Device and dtype that parameters are made with, inside a `with`."""

    def __init__(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._device is not None:
            self._device.__enter__()
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._before)
        if self._device is not None:
            self._device.__exit__(*error)
