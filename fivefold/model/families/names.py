"""Our parameter names and those of Hugging Face checkpoints."""

from __future__ import annotations

from fivefold.model.config import ModelConfig

ATTENTION = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
}
LATENT_QUERY = {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
}
LATENT = {
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_norm": "self_attn.kv_a_layernorm",
    "attention.key_value_up": "self_attn.kv_b_proj",
    "attention.output": "self_attn.o_proj",
}
FEED_FORWARD = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
EACH = "*"  # in a Hugging Face name: the number of each expert, which has a tensor of its own


def weight_names(config: ModelConfig) -> dict[str, str]:
    """Our name of every tensor to its Hugging Face name; see `stored_names` for experts."""
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not config.tie_embeddings:
        names["head.weight"] = "lm_head.weight"
    for layer in range(config.num_layers):
        block = _norms(config) | _attention(config) | _feed_forward(config, layer)
        names |= {f"layers.{layer}.{k}": f"model.layers.{layer}.{v}" for k, v in block.items()}
    return names


def is_stacked(name: str) -> bool:
    """Whether a Hugging Face name of `weight_names` stands for one tensor of each expert."""
    return EACH in name


def stored_names(name: str, config: ModelConfig) -> list[str]:
    """The tensors of a checkpoint that a name of `weight_names` means, in order.

    Experts are stacked here, and stored one by one: a name with a `*` is that of each of them.
    """
    if not is_stacked(name):
        return [name]
    assert config.moe is not None, "only experts have such names"
    return [name.replace(EACH, str(expert)) for expert in range(config.moe.experts)]


def stays_wide(name: str) -> bool:
    """Whether our tensor `name` is stored in fp32 in a model of any format."""
    return name.endswith("router.bias")


def _norms(config: ModelConfig) -> dict[str, str]:
    names = {"attention_norm.weight": "input_layernorm.weight"}
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


def _attention(config: ModelConfig) -> dict[str, str]:
    modules = dict(ATTENTION)
    biased = [m for m in ATTENTION if m != "attention.output"] if config.qkv_bias else []
    if config.mla is not None:
        straight = config.mla.query_rank is None
        query = {"attention.query": "self_attn.q_proj"} if straight else LATENT_QUERY
        modules = query | LATENT
        biased = [m for m in modules if m.endswith("_down") and config.qkv_bias]
    biased += ["attention.output"] if config.output_bias else []
    return _weights(modules) | {f"{m}.bias": f"{modules[m]}.bias" for m in biased}


def _feed_forward(config: ModelConfig, layer: int) -> dict[str, str]:
    if not config.is_sparse(layer):
        return _gated(config, "feed_forward", "mlp")
    assert config.moe is not None, "sparse layers have experts"
    mixtral = config.family == "mixtral"
    mixture = "block_sparse_moe" if mixtral else "mlp"
    names = {"feed_forward.router.weight": f"{mixture}.gate.weight"}
    if config.moe.correction_bias:
        names["feed_forward.router.bias"] = f"{mixture}.gate.e_score_correction_bias"
    leaves = MIXTRAL_EXPERT if mixtral else FEED_FORWARD
    for ours, theirs in leaves.items():
        names[f"feed_forward.experts.{ours}"] = f"{mixture}.experts.{EACH}.{theirs}.weight"
    if config.moe.shared_size:
        names |= _gated(config, "feed_forward.shared", f"{mixture}.shared_experts")
    return names


def _gated(config: ModelConfig, ours: str, theirs: str) -> dict[str, str]:
    modules = {f"{ours}.{k}": f"{theirs}.{v}" for k, v in FEED_FORWARD.items()}
    biases = {f"{k}.bias": f"{v}.bias" for k, v in modules.items()} if config.mlp_bias else {}
    return _weights(modules) | biases


def _weights(modules: dict[str, str]) -> dict[str, str]:
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in modules.items()}
