"""Small decoders of every family, with random weights that make every part matter."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.model.attention_backend import AttentionBackend, CausalAttention
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config

held = settings(deadline=None, derandomize=True, max_examples=25)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"sliding_window": 5, "head_dim": 10},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 12,
    },
}
FAMILIES = list(OWN)
families = st.sampled_from(FAMILIES)


def config(family: str, **changes: Any) -> ModelConfig:
    return parse_config({"model_type": family, **SIZES, **OWN[family], **changes})


def decoder(
    family: str, seed: int = 0, dtype: torch.dtype | None = None, **changes: Any
) -> Decoder:
    """Random weights; norms and biases too, which start constant."""
    model = Decoder(config(family, **changes))
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model if dtype is None else model.to(dtype)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(seed))


def positions(batch: int, length: int) -> Tensor:
    return torch.arange(length).expand(batch, length)


def logits(model: Decoder, ids: Tensor, attention: AttentionBackend | None = None) -> Tensor:
    """[B,S,V] of rows that are one document each."""
    return model.logits(model(ids, positions(*ids.shape), attention or CausalAttention()))
