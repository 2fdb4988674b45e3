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
    mscale_all_dim: float | None = None  # DeepSeek's yarn: see families/deepseek.py


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the feed-forward, on the layers that `sparse` names."""

    experts: int
    top_k: int  # experts a token is sent to
    expert_size: int  # inner width of one expert
    sparse: tuple[bool, ...]  # by layer; False: a dense feed-forward of `intermediate_size`
    shared_size: int = 0  # inner width of the experts that every token goes through; 0: none
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False  # weights of the chosen experts sum to 1
    scale: float = 1.0  # then times this
    groups: int = 1  # experts are chosen inside the best `top_groups` of so many equal groups
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # a group's best score, or its two best together
    correction_bias: bool = False  # a bias that takes part in choosing, not in weights


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-AI 2024): heads unfold from small latents.

    A head's query and key have `nope_dim + rope_dim` dims, of which the last turn with position.
    """

    query_rank: int | None  # None: queries come from the hidden state directly
    key_value_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True  # rotary pairs are neighbours; False: half of `rope_dim` apart


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
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that turn with position."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def value_dim(self) -> int:
        """Dims of a head's values; queries and keys have `head_dim`."""
        return self.head_dim if self.mla is None else self.mla.value_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's feed-forward is a mixture of experts."""
        return self.moe is not None and self.moe.sparse[layer]

    @property
    def scale(self) -> float:
        """Factor on query . key."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
