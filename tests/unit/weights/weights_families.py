"""Small transformers models of every family, and how to run ours beside them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "tie_word_embeddings": True, "eos_token_id": [2, 5]},
    "mistral": {"head_dim": 32, "sliding_window": 6, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 5,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}
TOKENS = torch.arange(20).reshape(2, 10) * 7 % 96


def make_theirs(family: str, **changes: Any) -> Any:
    """A transformers model with random values in every parameter, in fp32."""
    config_class, model_class = CLASSES[family]
    config = config_class(**SHAPE | SPECIFIC[family] | changes)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            spread = 0.1 if value.ndim > 1 else 0.2
            value.add_(torch.randn(value.shape, generator=generator) * spread)
    return model


@torch.no_grad()
def logits_of_ours(decoder: Decoder, tokens: Tensor = TOKENS) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return decoder.logits(decoder(tokens, positions, CausalAttention()))


@torch.no_grad()
def logits_of_theirs(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens, use_cache=False).logits.float()


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest difference, as a share of the largest reference value."""
    return float((value - reference).abs().max() / reference.abs().max())
