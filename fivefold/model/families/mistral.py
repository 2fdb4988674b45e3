"""Mistral (Jiang et al. 2023): Llama with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.model.config import ModelConfig
from fivefold.model.families import common, fields


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `mistral` config.json; `sliding_window: null` looks back without end."""
    shapes = common.shapes(hf)
    window = fields.window(hf)
    return ModelConfig(
        **shapes,
        windows=(window,) * shapes["num_layers"],
        ropes=(common.rope(hf),) * shapes["num_layers"],
        tie_embeddings=fields.flag(hf, "tie_word_embeddings"),
        activation=common.activation(hf, "hidden_act", "silu"),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Write a `mistral` config.json."""
    return {
        **common.export_shapes(config, "MistralForCausalLM"),
        **common.export_rope(config.ropes[0]),
        "sliding_window": config.windows[0],
        "hidden_act": common.EXPORTED_ACTIVATIONS[config.activation],
    }
