"""Which layers look back only a window, as config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import WeightsError
from fivefold.model.config import ModelConfig
from fivefold.model.families import fields

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(hf: Mapping[str, Any], count: int) -> tuple[str, ...] | None:
    """`layer_types` when the config lists them. Raises WeightsError when they do not fit."""
    given = hf.get("layer_types")
    if given is None:
        return None
    listed = [str(kind) for kind in given] if isinstance(given, list | tuple) else []
    if set(listed) - {SLIDING, FULL} or len(listed) != count:
        raise WeightsError(
            f"layer_types lists {len(listed)} layers of kinds {sorted(set(listed))} for {count} layers",
            f"list {SLIDING} or {FULL} for each layer",
        )
    return tuple(listed)


def qwen_windows(hf: Mapping[str, Any], count: int) -> tuple[int | None, ...]:
    """Qwen: with `use_sliding_window`, the layers from `max_window_layers` on (or as listed)."""
    window = fields.window(hf) if fields.flag(hf, "use_sliding_window") else None
    if window is None:
        return (None,) * count
    listed = layer_types(hf, count)
    if listed is not None:
        return tuple(window if kind == SLIDING else None for kind in listed)
    first = hf.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise WeightsError(
            f"`max_window_layers` of the model's config is {first!r}", "use a whole number >= 0"
        )
    return tuple(window if layer >= first else None for layer in range(count))


def export_windows(config: ModelConfig) -> dict[str, Any]:
    """`layer_types` and the window they share."""
    windows = [w for w in config.windows if w is not None]
    return {
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
        "layer_types": [FULL if w is None else SLIDING for w in config.windows],
        "max_window_layers": config.num_layers,
    }
