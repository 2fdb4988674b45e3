"""Qwen3 dense (Yang et al. 2025): RMSNorm on each head's query and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.model.config import ModelConfig
from fivefold.model.families import common, fields
from fivefold.model.families.windows import export_windows, qwen_windows


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `qwen3` config.json; heads are of 128 unless it says otherwise."""
    shapes = common.shapes({"head_dim": 128, **hf})
    bias = fields.flag(hf, "attention_bias")
    return ModelConfig(
        **shapes,
        windows=qwen_windows(hf, shapes["num_layers"]),
        ropes=(common.rope(hf),) * shapes["num_layers"],
        tie_embeddings=fields.flag(hf, "tie_word_embeddings"),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        activation=common.activation(hf, "hidden_act", "silu"),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Write a `qwen3` config.json."""
    return {
        **common.export_shapes(config, "Qwen3ForCausalLM"),
        **common.export_rope(config.ropes[0]),
        **export_windows(config),
        "attention_bias": config.qkv_bias,
        "hidden_act": common.EXPORTED_ACTIVATIONS[config.activation],
    }
