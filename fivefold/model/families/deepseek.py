"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, and shared beside routed experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.core.errors import WeightsError, nearest
from fivefold.model.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from fivefold.model.families import common, fields
from fivefold.model.families.experts import check_experts

V2, V3 = "deepseek_v2", "deepseek_v3"
CLASSES = {V2: "DeepseekV2ForCausalLM", V3: "DeepseekV3ForCausalLM"}
# What transformers assumes for fields that a config leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    V2: {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "topk_method": "greedy"},
    V3: {
        "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "topk_method": "noaux_tc",
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
METHODS = {V2: ("greedy", "group_limited_greedy"), V3: ("noaux_tc",)}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `deepseek_v2` or `deepseek_v3` config.json.

    Layers for multi-token prediction (`num_nextn_predict_layers`) are no part of the decoder.
    """
    family = hf["model_type"]
    hf = {**DEFAULTS[family], **{k: v for k, v in hf.items() if v is not None}}
    mla = _mla(hf)
    # The field says how much of a head turns, if anything; heads are told by their own parts.
    shapes = common.shapes({**hf, "head_dim": mla.rope_dim, "num_key_value_heads": None})
    shapes["head_dim"] = mla.nope_dim + mla.rope_dim
    layers = shapes["num_layers"]
    rope = _rope(hf)
    bias = fields.flag(hf, "attention_bias")
    moe = _moe(hf, layers)
    check_experts(moe)
    return ModelConfig(
        **shapes,
        windows=(None,) * layers,
        ropes=(rope,) * layers,
        tie_embeddings=fields.flag(hf, "tie_word_embeddings"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=family == V2 and fields.flag(hf, "mlp_bias"),
        activation=common.activation(hf, "hidden_act", "silu"),
        attention_scale=shapes["head_dim"] ** -0.5 * _sharpening(rope),
        moe=moe,
        mla=mla,
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Write a config.json of the same family."""
    moe, mla, rope = config.moe, config.mla, config.ropes[0]
    assert moe is not None and mla is not None, "the families have both"
    grouped = {"n_group": moe.groups, "topk_group": moe.top_groups}
    scaling = common.export_scaling(rope)
    if scaling is not None and rope.mscale_all_dim is not None:
        scaling["mscale_all_dim"] = rope.mscale_all_dim
    own: dict[str, Any] = (
        {
            "topk_method": METHODS[V2][moe.groups > 1],
            "mlp_bias": config.mlp_bias,
            "norm_topk_prob": False,
            **(grouped if moe.groups > 1 else {}),
        }
        if config.family == V2
        else {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": moe.normalise,
            "rope_interleave": mla.interleaved,
            "num_nextn_predict_layers": 0,
            **grouped,
        }
    )
    return {
        **common.export_shapes(config, CLASSES[config.family]),
        "head_dim": mla.rope_dim,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "attention_bias": config.qkv_bias,
        "hidden_act": common.EXPORTED_ACTIVATIONS[config.activation],
        "q_lora_rank": mla.query_rank,
        "kv_lora_rank": mla.key_value_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": moe.sparse.count(False),
        "moe_layer_freq": 1,
        **own,
    }


def _mla(hf: Mapping[str, Any]) -> MLAConfig:
    return MLAConfig(
        query_rank=fields.whole(hf, "q_lora_rank"),
        key_value_rank=fields.required(hf, "kv_lora_rank"),
        nope_dim=fields.required(hf, "qk_nope_head_dim"),
        rope_dim=fields.required(hf, "qk_rope_head_dim"),
        value_dim=fields.required(hf, "v_head_dim"),
        interleaved=hf["model_type"] == V2 or fields.flag(hf, "rope_interleave", default=True),
    )


def _moe(hf: Mapping[str, Any], layers: int) -> MoEConfig:
    family = hf["model_type"]
    method = hf["topk_method"]
    if method not in METHODS[family]:
        raise WeightsError(
            f"topk_method={method!r} of {family} is not covered",
            nearest(str(method), METHODS[family]),
        )
    if hf.get("moe_layer_freq", 1) != 1:
        raise WeightsError(
            f"moe_layer_freq={hf['moe_layer_freq']!r} is not covered",
            "use a model with experts on every layer after the first dense ones",
        )
    size = fields.required(hf, "moe_intermediate_size")
    dense = min(fields.count(hf, "first_k_dense_replace"), layers)
    common_to_both: dict[str, Any] = {
        "experts": fields.required(hf, "n_routed_experts"),
        "top_k": fields.required(hf, "num_experts_per_tok"),
        "expert_size": size,
        "shared_size": size * fields.count(hf, "n_shared_experts"),
        "scale": fields.number(hf, "routed_scaling_factor", 1.0),
        "sparse": (False,) * dense + (True,) * (layers - dense),
    }
    if method != "greedy":
        common_to_both["groups"] = fields.required(hf, "n_group")
        common_to_both["top_groups"] = fields.required(hf, "topk_group")
    if family == V3:
        return MoEConfig(
            **common_to_both,
            score="sigmoid",
            normalise=fields.flag(hf, "norm_topk_prob"),
            group_score="top2",
            correction_bias=True,
        )
    if fields.flag(hf, "norm_topk_prob"):
        raise WeightsError(
            "norm_topk_prob=True of deepseek_v2 is not covered: DeepSeek's code and transformers "
            "do different things with it",
            "use a published model, none of which has it",
        )
    return MoEConfig(**common_to_both)


def _rope(hf: Mapping[str, Any]) -> RopeConfig:
    """DeepSeek scales cosines and sines by the ratio of two logarithms, and scores by one."""
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    settings = hf.get(name) or {}
    if not isinstance(settings, Mapping):
        return common.rope(hf)  # says what is wrong
    plain = {k: v for k, v in settings.items() if k not in ("mscale", "mscale_all_dim")}
    rope = common.rope({**hf, name: plain})
    if rope.kind != "yarn":
        return rope
    # 0 is as good as nothing, in transformers too.
    above, below = (settings.get(field) or None for field in ("mscale", "mscale_all_dim"))
    for field, value in (("mscale", above), ("mscale_all_dim", below)):
        if value is not None:
            fields.positive(field, value)
    if rope.attention_factor is None and above and below:
        ratio = _mscale(rope.factor, above) / _mscale(rope.factor, below)
        rope = replace(rope, attention_factor=ratio)
    return replace(rope, mscale_all_dim=None if below is None else float(below))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _sharpening(rope: RopeConfig) -> float:
    """Factor on scores in long contexts: queries and keys each would have its root."""
    return 1.0 if rope.mscale_all_dim is None else _mscale(rope.factor, rope.mscale_all_dim) ** 2
