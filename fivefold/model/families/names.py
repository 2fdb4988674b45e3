"""Our parameter names and those of Hugging Face checkpoints."""

from __future__ import annotations

from fivefold.model.config import ModelConfig

PROJECTIONS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def weight_names(config: ModelConfig) -> dict[str, str]:
    """Our name of every parameter to its Hugging Face tensor name."""
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not config.tie_embeddings:
        names["head.weight"] = "lm_head.weight"
    block = _block(config)
    for layer in range(config.num_layers):
        names |= {f"layers.{layer}.{k}": f"model.layers.{layer}.{v}" for k, v in block.items()}
    return names


def _block(config: ModelConfig) -> dict[str, str]:
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in PROJECTIONS.items()}
    names |= {f"{m}.bias": f"{PROJECTIONS[m]}.bias" for m in PROJECTIONS if _has_bias(config, m)}
    names["attention_norm.weight"] = "input_layernorm.weight"
    if config.post_norms:
        names["attention_post_norm.weight"] = "post_attention_layernorm.weight"
        names["feed_forward_norm.weight"] = "pre_feedforward_layernorm.weight"
        names["feed_forward_post_norm.weight"] = "post_feedforward_layernorm.weight"
    else:
        names["feed_forward_norm.weight"] = "post_attention_layernorm.weight"
    if config.qk_norm:
        names["attention.query_norm.weight"] = "self_attn.q_norm.weight"
        names["attention.key_norm.weight"] = "self_attn.k_norm.weight"
    return names


def _has_bias(config: ModelConfig, module: str) -> bool:
    if module == "attention.output":
        return config.output_bias
    return config.qkv_bias if module.startswith("attention") else config.mlp_bias
