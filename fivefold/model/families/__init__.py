"""Families are data: a Hugging Face config.json to and from a ModelConfig, and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import WeightsError, nearest
from fivefold.model.config import ModelConfig
from fivefold.model.families import (
    deepseek,
    gemma3,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from fivefold.model.families.names import is_stacked, stays_wide, stored_names, weight_names

# model_type of config.json: the module that reads it and writes it back.
FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3_text": gemma3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
}


def parse_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a config.json describes; a multimodal Gemma 3's text part.

    Reads the spellings of transformers 4 (`rope_theta`, `rope_scaling`) and 5
    (`rope_parameters`). Raises WeightsError for a family that is not covered, a missing field or
    a setting that the decoder does not have.
    """
    if hf.get("model_type") == "gemma3" and isinstance(hf.get("text_config"), Mapping):
        # Token ids may stand beside the text's own settings.
        outside = {key: value for key, value in hf.items() if key.endswith("_token_id")}
        hf = {**outside, "model_type": "gemma3_text", **hf["text_config"]}
    family = hf.get("model_type")
    if not isinstance(family, str):
        raise WeightsError("the model's config has no `model_type`", "is it a config.json?")
    if family not in FAMILIES:
        raise WeightsError(f"model_type {family!r} is not covered", nearest(family, FAMILIES))
    return FAMILIES[family].parse(hf)


def export_config(config: ModelConfig) -> dict[str, Any]:
    """A config.json that transformers opens."""
    return FAMILIES[config.family].export(config)


__all__ = [
    "FAMILIES",
    "export_config",
    "is_stacked",
    "parse_config",
    "stays_wide",
    "stored_names",
    "weight_names",
]
