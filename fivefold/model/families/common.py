"""What all families' config.json have in common: shapes, rotary settings, token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import WeightsError, nearest
from fivefold.model.config import ModelConfig, RopeConfig
from fivefold.model.families import fields
from fivefold.model.families.fields import required

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
EXPORTED_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def shapes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """ModelConfig's shape fields. Raises WeightsError where they do not fit together."""
    hidden, heads = required(hf, "hidden_size"), required(hf, "num_attention_heads")
    kv_heads = fields.whole(hf, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise WeightsError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}",
            "each key/value head serves a whole number of query heads",
        )
    head_dim = fields.whole(hf, "head_dim")
    if head_dim is None and hidden % heads:
        raise WeightsError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}",
            "set head_dim, or mend one of them",
        )
    head_dim = head_dim or hidden // heads
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
        "norm_eps": fields.number(hf, "rms_norm_eps", 1e-6),
        "initializer_range": fields.number(hf, "initializer_range", 0.02),
        "bos_token_id": fields.first_token(hf, "bos_token_id"),
        "eos_token_ids": fields.tokens(hf, "eos_token_id"),
        "pad_token_id": fields.first_token(hf, "pad_token_id"),
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
    if not isinstance(settings, Mapping):
        raise WeightsError(
            f"the rope settings of the model's config are {settings!r}", "use a mapping, or null"
        )
    # Some configs say beside the settings what belongs in them; transformers lets that win.
    outside = ("original_max_position_embeddings", "partial_rotary_factor")
    beside = {field: hf[field] for field in outside if hf.get(field) is not None}
    return parse_rope({**settings, **beside}, fields.number(hf, "rope_theta", default_theta))


def parse_rope(settings: Mapping[str, Any], default_theta: float) -> RopeConfig:
    """One `rope_parameters` or `rope_scaling` mapping."""
    kind: Any = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in _ROPE_FIELDS:
        raise WeightsError(
            f"rope scaling {kind!r} is not covered", nearest(str(kind), _ROPE_FIELDS)
        )
    partial = settings.get("partial_rotary_factor", 1.0) != 1.0
    for foreign in ("mscale", "mscale_all_dim", *(["partial_rotary_factor"] * partial)):
        if settings.get(foreign) is not None:
            raise WeightsError(
                f"rope setting {foreign}={settings[foreign]!r} is not covered",
                "use a model without it",
            )
    for field in _NEEDED[kind]:
        if settings.get(field) is None:
            raise WeightsError(
                f"rope scaling {kind!r} has no `{field}`", "add it to the model's config"
            )
    given = {
        ours: _rope_value(settings, theirs)
        for ours, theirs in _ROPE_FIELDS[kind].items()
        if settings.get(theirs) is not None
    }
    return RopeConfig(
        theta=fields.number(settings, "rope_theta", default_theta), kind=kind, **given
    )


def _rope_value(settings: Mapping[str, Any], field: str) -> Any:
    if field == "truncate":
        return fields.flag(settings, field)
    if field == "original_max_position_embeddings":
        return fields.whole(settings, field)
    return fields.positive(field, settings[field])


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
    values = {theirs: getattr(config, ours) for ours, theirs in _ROPE_FIELDS[config.kind].items()}
    return {"rope_type": config.kind, **{k: v for k, v in values.items() if v is not None}}


_ORIGINAL = {"original_positions": "original_max_position_embeddings"}
# The settings that each kind reads: RopeConfig's name to config.json's.
_ROPE_FIELDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        **_ORIGINAL,
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
        **_ORIGINAL,
    },
}
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
