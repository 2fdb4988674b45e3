"""Gemma 3 text (Gemma Team 2025): local and global layers, norms before and after, QK norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import WeightsError
from fivefold.model.config import ModelConfig, RopeConfig
from fivefold.model.families import common, fields
from fivefold.model.families.windows import FULL, SLIDING, layer_types

# What transformers assumes for fields that published Gemma 3 configs leave out.
DEFAULTS = {
    "vocab_size": 262_208,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
GLOBAL_EVERY = 6
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `gemma3_text` config.json.

    `attn_logit_softcapping` is Gemma 2's, kept in Gemma 3 configs but applied neither by the
    published models, where QK norm took its place, nor by transformers: it changes nothing here.
    """
    if fields.flag(hf, "use_bidirectional_attention"):
        raise WeightsError(
            "a Gemma 3 that attends in both directions is not covered",
            "use one that generates text",
        )
    given = {k: v for k, v in hf.items() if v is not None}
    shapes = common.shapes({**DEFAULTS, **given})
    kinds = layer_types(hf, shapes["num_layers"]) or _pattern(hf, shapes["num_layers"])
    ropes = _ropes(hf)
    window = fields.required({"sliding_window": 4096, **hf}, "sliding_window")
    per_head = fields.whole(hf, "query_pre_attn_scalar") or 256
    bias = fields.flag(hf, "attention_bias")
    return ModelConfig(
        **shapes,
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        norm_offset=1.0,
        post_norms=True,
        qk_norm=True,
        tie_embeddings=fields.flag(hf, "tie_word_embeddings", default=True),
        qkv_bias=bias,
        output_bias=bias,
        activation=common.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=per_head**-0.5,
        logit_softcap=fields.optional_number(hf, "final_logit_softcapping"),
        embedding_scale=shapes["hidden_size"] ** 0.5,
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Write a `gemma3_text` config.json."""
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    ropes = dict(zip(kinds, config.ropes, strict=True))
    windows = [w for w in config.windows if w is not None]
    whole = ropes.get(FULL, RopeConfig(theta=GLOBAL_THETA))
    return {
        **common.export_shapes(config, "Gemma3ForCausalLM"),
        "rope_theta": whole.theta,
        "rope_scaling": common.export_scaling(whole),
        "rope_local_base_freq": ropes.get(SLIDING, RopeConfig(theta=LOCAL_THETA)).theta,
        "layer_types": kinds,
        "sliding_window": windows[0] if windows else 4096,
        "query_pre_attn_scalar": round(config.scale**-2),
        "final_logit_softcapping": config.logit_softcap,
        "attention_bias": config.qkv_bias,
        "hidden_activation": common.EXPORTED_ACTIVATIONS[config.activation],
    }


def _pattern(hf: Mapping[str, Any], count: int) -> tuple[str, ...]:
    every = fields.whole(hf, "sliding_window_pattern") or GLOBAL_EVERY
    return tuple(FULL if (layer + 1) % every == 0 else SLIDING for layer in range(count))


def _ropes(hf: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """Local layers turn faster; context-extension scaling is for global layers alone."""
    settings = hf.get("rope_parameters") or {}
    nested = FULL in settings or SLIDING in settings
    whole = {**hf, "rope_parameters": settings.get(FULL)} if nested else hf
    local = (settings.get(SLIDING) or {}) if nested else {}
    theta = fields.number(hf, "rope_local_base_freq", LOCAL_THETA)
    ropes = {
        FULL: common.rope(whole, default_theta=GLOBAL_THETA),
        SLIDING: common.parse_rope(local, theta),
    }
    if ropes[SLIDING].kind != "default":
        raise WeightsError(
            f"rope scaling {ropes[SLIDING].kind!r} of sliding layers is not covered",
            f"scale those of {FULL} alone, as Gemma 3 does",
        )
    return ropes
