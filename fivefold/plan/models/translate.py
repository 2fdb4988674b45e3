"""A config.json as a shape: families of fivefold exactly, others as near as its decoder comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.core.errors import FivefoldError, PlanError
from fivefold.model.families import FAMILIES, parse_config
from fivefold.plan.models.near import NEAR
from fivefold.plan.models.unknown import unknown
from fivefold.plan.shape import ModelShape

Config = Mapping[str, Any]
MOST_LAYERS = 10_000
GEMMA3 = "gemma3"  # several parts, which the family itself takes apart


def from_config(hf: Config, name: str, source: str = "") -> ModelShape:
    """The shape of a config.json; `notes` say what of it is approximated.

    Raises PlanError naming the field that is missing or wrong.
    """
    hf = _text_part(hf)
    kind = hf.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise PlanError(f"`model_type` of {name} is {kind!r}", "use a name")
    layers = hf.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise PlanError(
            f"`num_hidden_layers` of {name} is {layers:,}", f"use at most {MOST_LAYERS:,}"
        )
    try:
        if kind in NEAR:
            return replace(NEAR[kind](hf, name), source=source)
        if kind in FAMILIES or kind == GEMMA3:
            return ModelShape(
                name=name, config=parse_config(hf), source=source, notes=_left_out(hf)
            )
        return replace(unknown(hf, name), source=source)
    except PlanError:
        raise
    except FivefoldError as error:
        raise PlanError(f"{name}: {error.message}", error.mend) from error


def _text_part(hf: Config) -> Config:
    """The language model of a config that has several parts."""
    text = hf.get("text_config") or hf.get("llm_config")
    if not isinstance(text, Mapping) or hf.get("model_type") == GEMMA3:
        return hf
    kind = text.get("model_type") or hf.get("model_type")
    outside = {"tie_word_embeddings": hf.get("tie_word_embeddings")}
    return {**{k: v for k, v in outside.items() if v is not None}, **text, "model_type": kind}


def _left_out(hf: Config) -> tuple[str, ...]:
    if hf.get("num_nextn_predict_layers"):
        return ("layers for multi-token prediction are left out",)
    return ()
