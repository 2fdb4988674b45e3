"""What all families' config.json have in common: shapes, rotary settings, token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import WeightsError, nearest
from fivefold.model.config import ModelConfig, RopeConfig

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
EXPORTED_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def required(hf: Mapping[str, Any], field: str) -> int:
    """A positive whole number that config.json must have."""
    if hf.get(field) is None:
        raise WeightsError(
            f"the {hf['model_type']} config has no `{field}`", "add it to the model's config"
        )
    value = hf[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WeightsError(
            f"`{field}` of the model's config is {value!r}", "use a whole number >= 1"
        )
    return value


def shapes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """ModelConfig's shape fields. Raises WeightsError where they do not fit together."""
    hidden, heads = required(hf, "hidden_size"), required(hf, "num_attention_heads")
    kv_heads = (
        heads if hf.get("num_key_value_heads") is None else required(hf, "num_key_value_heads")
    )
    if heads % kv_heads:
        raise WeightsError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}",
            "each key/value head serves a whole number of query heads",
        )
    if hf.get("head_dim") is None and hidden % heads:
        raise WeightsError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}",
            "set head_dim, or mend one of them",
        )
    head_dim = hidden // heads if hf.get("head_dim") is None else required(hf, "head_dim")
    if head_dim % 2:
        raise WeightsError(f"head_dim={head_dim} is odd", "rotary positions turn pairs of dims")
    return {
        "family": hf["model_type"],
        "vocab_size": required(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": required(hf, "intermediate_size"),
        "num_layers": required(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": required(hf, "max_position_embeddings"),
        "initializer_range": float(hf.get("initializer_range", 0.02)),
        "bos_token_id": _first(hf.get("bos_token_id")),
        "eos_token_ids": _all(hf.get("eos_token_id")),
        "pad_token_id": _first(hf.get("pad_token_id")),
    }


def activation(hf: Mapping[str, Any], field: str, default: str) -> Any:
    """`silu` or `gelu_tanh` from a family's activation field."""
    name = hf.get(field) or default
    if name not in ACTIVATIONS:
        raise WeightsError(f"{field}={name!r} is not covered", nearest(str(name), ACTIVATIONS))
    return ACTIVATIONS[name]


def rope(hf: Mapping[str, Any], default_theta: float = 10_000.0) -> RopeConfig:
    """Rotary settings in the spelling of transformers 4 or 5."""
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = settings.get("rope_theta", hf.get("rope_theta"))
    return parse_rope(settings, default_theta if theta is None else theta)


def parse_rope(settings: Mapping[str, Any], theta: float) -> RopeConfig:
    """One `rope_parameters` or `rope_scaling` mapping."""
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise WeightsError(f"rope scaling {kind!r} is not covered", nearest(str(kind), ROPE_KINDS))
    if kind != "default" and settings.get("factor") is None:
        raise WeightsError(f"rope scaling {kind!r} has no `factor`", "add it to the model's config")
    if settings.get("partial_rotary_factor", 1.0) != 1.0 or settings.get("mscale") is not None:
        raise WeightsError(
            "partial rotary embedding and mscale are not covered", "use a family that is"
        )
    given = {
        ours: settings[theirs]
        for ours, theirs in _ROPE_FIELDS.items()
        if settings.get(theirs) is not None
    }
    return RopeConfig(theta=float(theta), kind=kind, **given)


def export_shapes(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """The fields of `shapes` back in config.json's words."""
    eos = config.eos_token_ids
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        "pad_token_id": config.pad_token_id,
    }


def export_rope(config: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the spelling that every transformers release reads."""
    return {"rope_theta": config.theta, "rope_scaling": export_scaling(config)}


def export_scaling(config: RopeConfig) -> dict[str, Any] | None:
    """A `rope_scaling` mapping; None for plain rotary positions."""
    if config.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": config.kind, "factor": config.factor}
    wanted = {
        "linear": (),
        "dynamic": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    }[config.kind]
    for ours in (*wanted, "original_positions"):
        value = getattr(config, ours)
        if value is not None:
            scaling[_ROPE_FIELDS[ours]] = value
    return scaling


_ROPE_FIELDS = {
    "factor": "factor",
    "original_positions": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}


def _first(value: Any) -> int | None:
    return _all(value)[0] if _all(value) else None


def _all(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
