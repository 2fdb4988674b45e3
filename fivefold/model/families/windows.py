"""Which layers look back only a window, as config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import WeightsError
from fivefold.model.config import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(hf: Mapping[str, Any], count: int) -> tuple[str, ...] | None:
    """`layer_types` when the config lists them. Raises WeightsError when they do not fit."""
    given = hf.get("layer_types")
    if given is None:
        return None
    unknown = set(given) - {SLIDING, FULL}
    if unknown or len(given) != count:
        raise WeightsError(
            f"layer_types lists {len(given)} layers of kinds {sorted(set(given))} for {count} layers",
            f"list {SLIDING} or {FULL} for each layer",
        )
    return tuple(given)


def qwen_windows(hf: Mapping[str, Any], count: int) -> tuple[int | None, ...]:
    """Qwen: with `use_sliding_window`, the layers from `max_window_layers` on (or as listed)."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    if window is None:
        return (None,) * count
    listed = layer_types(hf, count)
    if listed is not None:
        return tuple(window if kind == SLIDING else None for kind in listed)
    first = hf.get("max_window_layers", 28)
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
