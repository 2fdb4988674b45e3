"""What a decoder is, as data. Families (see `families/`) differ by these values alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021) and its context-extension scaling."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_positions: int | None = None  # context length before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the correction range to whole dims


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of one decoder. Per-layer values are tuples of `num_layers` entries."""

    family: str  # key of families.FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]  # tokens a query may look back, itself included; None: all
    ropes: tuple[RopeConfig, ...]
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # gemma scales by (1 + weight)
    post_norms: bool = False  # gemma: norms after attention and feed-forward as well
    qk_norm: bool = False  # RMSNorm of each head's query and key before rope
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def scale(self) -> float:
        """Factor on query . key."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
