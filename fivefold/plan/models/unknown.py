"""A family that nobody here has met: read as a Llama, with what experts and latents it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.core.errors import PlanError, nearest
from fivefold.model.config import MoEConfig
from fivefold.model.families import FAMILIES, parse_config
from fivefold.plan.models.near import NEAR
from fivefold.plan.shape import ModelShape

Config = Mapping[str, Any]
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "experts_per_token")
INNER = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")


def unknown(hf: Config, name: str) -> ModelShape:
    """The shape. Raises PlanError naming a field without which there is no decoder to speak of."""
    kind = hf.get("model_type")
    for field in NEEDED:
        if not isinstance(hf.get(field), int):
            raise PlanError(
                f"{name}: the config of model_type {kind!r} has no `{field}`",
                f"add it, or use a model_type that is known ({nearest(str(kind), (*FAMILIES, *NEAR))})",
            )
    settings = {
        "max_position_embeddings": 131_072,
        **{key: value for key, value in hf.items() if value is not None},
        "rope_scaling": None,
        "rope_parameters": None,
        "hidden_act": "silu",
    }
    settings.setdefault("intermediate_size", settings.get("moe_intermediate_size"))
    note = f"model_type {kind!r} is unknown and read as"
    if settings.get("kv_lora_rank"):
        settings.setdefault("n_routed_experts", _first(hf, EXPERTS))
        latent = {"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}
        config = parse_config({**settings, **latent, "model_type": "deepseek_v3"})
        return ModelShape(name, config, notes=(f"{note} DeepSeek-V3",), runs=False)
    config = parse_config({**settings, "model_type": "llama", "mlp_bias": False})
    experts = _first(hf, EXPERTS)
    if experts is None or experts < 2:
        return ModelShape(name, config, notes=(f"{note} Llama",), runs=False)
    inner = _first(hf, INNER)
    if inner is None:
        raise PlanError(f"{name}: the config has no `{INNER[0]}`", "add it to the config")
    dense = hf.get("first_k_dense_replace") or 0
    shared = hf.get("shared_expert_intermediate_size") or inner * (hf.get("n_shared_experts") or 0)
    moe = MoEConfig(
        experts=experts,
        top_k=_first(hf, CHOSEN) or 2,
        expert_size=inner,
        sparse=tuple(layer >= dense for layer in range(config.num_layers)),
        shared_size=shared,
        normalise=True,
    )
    notes = (f"{note} Llama with {experts} experts, {moe.top_k} of them a token",)
    return ModelShape(name, replace(config, moe=moe), notes=notes, runs=False)


def _first(hf: Config, fields: tuple[str, ...]) -> int | None:
    """The first of the fields that is a number."""
    return next((hf[field] for field in fields if isinstance(hf.get(field), int)), None)
