"""Small random models in transformers and the same weights in our decoder."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config, weight_names

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,  # wide enough that greedy text wanders instead of repeating
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "llama-dynamic": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": DYNAMIC}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 16,
        },
    ),
}


def build(kind: str, seed: int = 0, **changes: Any) -> tuple[torch.nn.Module, Decoder]:
    """(transformers' model, our decoder) with equal random fp32 weights."""
    config_class, model_class, own = KINDS[kind]
    sizes = {**SIZES, **own, **changes}
    if kind == "qwen2":
        sizes.pop("head_dim")
        sizes["hidden_size"] = 72
    torch.manual_seed(seed)
    theirs = model_class(config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:  # norms and biases start constant: make them matter
                parameter.add_(torch.randn_like(parameter) * 0.2)
    config = parse_config(theirs.config.to_dict())
    ours = Decoder(config)
    state = theirs.state_dict()
    names = weight_names(config)
    ours.load_state_dict({own_name: state[their_name] for own_name, their_name in names.items()})
    return theirs, ours


def continuation(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    """What transformers' `generate` adds to one prompt, greedily, an end token included."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, **settings
    )
    return out[0, len(prompt) :].tolist()
