"""Grouped-query attention (Ainslie et al. 2023) with rotary positions and optional QK norm."""

from __future__ import annotations

# B batch, S sequence, D hidden, H query heads, K key/value heads, E head_dim
from torch import Tensor, nn

from fivefold.kernels.rope import apply_rope
from fivefold.model.attention_backend import AttentionBackend
from fivefold.model.config import ModelConfig
from fivefold.model.norm import RMSNorm
from fivefold.model.projection import Projection


class Attention(nn.Module):
    """Projections around whatever attention backend is handed in."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.scale
        self.window = config.windows[layer]
        self.softcap = config.attention_softcap
        heads, kv_heads = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.query = Projection(config.hidden_size, heads, bias=config.qkv_bias)
        self.key = Projection(config.hidden_size, kv_heads, bias=config.qkv_bias)
        self.value = Projection(config.hidden_size, kv_heads, bias=config.qkv_bias)
        self.output = Projection(heads, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.query_norm: nn.Module = RMSNorm(config, config.head_dim)
            self.key_norm: nn.Module = RMSNorm(config, config.head_dim)
        else:
            self.query_norm = nn.Identity()
            self.key_norm = nn.Identity()

    def forward(
        self, hidden: Tensor, tables: tuple[Tensor, Tensor], backend: AttentionBackend
    ) -> Tensor:
        """[B,S,D] to [B,S,D]."""
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.query_norm(self.query(hidden).view(heads))
        key = self.key_norm(self.key(hidden).view(heads))
        attended = backend(
            apply_rope(query, *tables),
            apply_rope(key, *tables),
            self.value(hidden).view(heads),
            layer=self.layer,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
        )
        return self.output(attended.flatten(-2))
