"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.model.config import ModelConfig, MoEConfig
from fivefold.model.families import common, fields
from fivefold.model.families.experts import check_experts

# What transformers assumes for fields that a config leaves out.
DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "rope_theta": 1_000_000.0}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `mixtral` config.json; the window is null in all published ones."""
    hf = {**DEFAULTS, **{k: v for k, v in hf.items() if v is not None}}
    shapes = common.shapes(hf)
    layers = shapes["num_layers"]
    moe = MoEConfig(
        experts=fields.required(hf, "num_local_experts"),
        top_k=fields.required(hf, "num_experts_per_tok"),
        expert_size=shapes["intermediate_size"],
        sparse=(True,) * layers,
        normalise=True,
    )
    check_experts(moe)
    return ModelConfig(
        **shapes,
        windows=(fields.whole(hf, "sliding_window"),) * layers,
        ropes=(common.rope(hf),) * layers,
        tie_embeddings=fields.flag(hf, "tie_word_embeddings"),
        activation=common.activation(hf, "hidden_act", "silu"),
        moe=moe,
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Write a `mixtral` config.json."""
    assert config.moe is not None, "the family is one of mixtures"
    return {
        **common.export_shapes(config, "MixtralForCausalLM"),
        **common.export_rope(config.ropes[0]),
        "sliding_window": config.windows[0],
        "hidden_act": common.EXPORTED_ACTIVATIONS[config.activation],
        "num_local_experts": config.moe.experts,
        "num_experts_per_tok": config.moe.top_k,
    }
