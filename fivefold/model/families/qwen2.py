"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.model.config import ModelConfig
from fivefold.model.families import common, fields
from fivefold.model.families.windows import export_windows, qwen_windows


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `qwen2` config.json."""
    shapes = common.shapes(hf)
    return ModelConfig(
        **shapes,
        windows=qwen_windows(hf, shapes["num_layers"]),
        ropes=(common.rope(hf),) * shapes["num_layers"],
        tie_embeddings=fields.flag(hf, "tie_word_embeddings"),
        qkv_bias=True,
        activation=common.activation(hf, "hidden_act", "silu"),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Write a `qwen2` config.json."""
    return {
        **common.export_shapes(config, "Qwen2ForCausalLM"),
        **common.export_rope(config.ropes[0]),
        **export_windows(config),
        "hidden_act": common.EXPORTED_ACTIVATIONS[config.activation],
    }
