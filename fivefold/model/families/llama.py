"""Llama 2, Llama 3.x and SmolLM2 (Touvron et al. 2023, Dubey et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.model.config import ModelConfig
from fivefold.model.families import common, fields


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `llama` config.json."""
    shapes = common.shapes(hf)
    bias = fields.flag(hf, "attention_bias")
    return ModelConfig(
        **shapes,
        windows=(None,) * shapes["num_layers"],
        ropes=(common.rope(hf),) * shapes["num_layers"],
        tie_embeddings=fields.flag(hf, "tie_word_embeddings"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag(hf, "mlp_bias"),
        activation=common.activation(hf, "hidden_act", "silu"),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Write a `llama` config.json."""
    return {
        **common.export_shapes(config, "LlamaForCausalLM"),
        **common.export_rope(config.ropes[0]),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": common.EXPORTED_ACTIVATIONS[config.activation],
    }
