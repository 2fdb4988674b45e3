"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

from __future__ import annotations

# B batch, S sequence, D hidden, H heads, R rank of a latent, N dims without and P dims with rope,
# E = N + P dims of a query or key, G dims of a value
import torch
from torch import Tensor, nn

from fivefold.kernels.rope import apply_rope
from fivefold.model.attention_backend import AttentionBackend
from fivefold.model.config import ModelConfig
from fivefold.model.norm import RMSNorm
from fivefold.model.projection import Projection

# The published models' code leaves the epsilon of latent norms at this, whatever the config says.
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Queries and keys unfold from latents; all heads share the part of the key that turns."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.mla is not None, "latent attention has its ranks and dims from config.mla"
        mla = self.mla = config.mla
        self.layer = layer
        self.scale = config.scale
        self.window = config.windows[layer]
        self.softcap = config.attention_softcap
        hidden, heads, bias = config.hidden_size, config.num_heads, config.qkv_bias
        if mla.query_rank is None:
            self.query = Projection(hidden, heads * config.head_dim, bias=False)
        else:
            self.query_down = Projection(hidden, mla.query_rank, bias=bias)
            self.query_norm = RMSNorm(config, mla.query_rank, LATENT_EPS)
            self.query_up = Projection(mla.query_rank, heads * config.head_dim, bias=False)
        self.key_value_down = Projection(hidden, mla.key_value_rank + mla.rope_dim, bias=bias)
        self.key_value_norm = RMSNorm(config, mla.key_value_rank, LATENT_EPS)
        unfolded = heads * (mla.nope_dim + mla.value_dim)
        self.key_value_up = Projection(mla.key_value_rank, unfolded, bias=False)
        self.output = Projection(heads * mla.value_dim, hidden, bias=config.output_bias)

    def forward(
        self, hidden: Tensor, tables: tuple[Tensor, Tensor], backend: AttentionBackend
    ) -> Tensor:
        """[B,S,D] to [B,S,D]. The backend sees [B,S,H,E], [B,S,H,E] and [B,S,H,G]."""
        mla = self.mla
        query = self._unfold_query(hidden).unflatten(-1, (-1, mla.nope_dim + mla.rope_dim))
        still, turning = query.split((mla.nope_dim, mla.rope_dim), dim=-1)
        query = torch.cat((still, self._turn(turning, tables)), dim=-1)
        latent, shared = self.key_value_down(hidden).split((mla.key_value_rank, mla.rope_dim), -1)
        unfolded = self.key_value_up(self.key_value_norm(latent))
        still, value = unfolded.unflatten(-1, (-1, mla.nope_dim + mla.value_dim)).split(
            (mla.nope_dim, mla.value_dim), dim=-1
        )
        shared = self._turn(shared.unsqueeze(-2), tables).expand(-1, -1, still.shape[2], -1)
        key = torch.cat((still, shared), dim=-1)
        attended = backend(
            query,
            key,
            value,
            layer=self.layer,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
        )
        return self.output(attended.flatten(-2))

    def _unfold_query(self, hidden: Tensor) -> Tensor:
        """[B,S,D] to [B,S,H*E]."""
        if self.mla.query_rank is None:
            return self.query(hidden)
        return self.query_up(self.query_norm(self.query_down(hidden)))

    def _turn(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotary positions on [B,S,H,P].

        Pairs that are neighbours are put half of P apart first. They stay there: queries and keys
        change alike, and only their products are used.
        """
        if self.mla.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rope(x, *tables)
