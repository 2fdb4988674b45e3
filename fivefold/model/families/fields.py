"""Reading single fields of a config.json, with errors that name the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import WeightsError


def required(hf: Mapping[str, Any], field: str) -> int:
    """A positive whole number that config.json must have."""
    if hf.get(field) is None:
        raise WeightsError(
            f"the {hf['model_type']} config has no `{field}`", "add it to the model's config"
        )
    return _whole(field, hf[field])


def whole(hf: Mapping[str, Any], field: str) -> int | None:
    """A positive whole number, or None where the field is absent or null."""
    return None if hf.get(field) is None else _whole(field, hf[field])


def count(hf: Mapping[str, Any], field: str) -> int:
    """A whole number, 0 where the field is absent or null."""
    value = hf.get(field) or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WeightsError(
            f"`{field}` of the model's config is {value!r}", "use a whole number >= 0"
        )
    return value


def number(hf: Mapping[str, Any], field: str, default: float) -> float:
    """A positive finite number; `default` where the field is absent or null."""
    return default if hf.get(field) is None else positive(field, hf[field])


def optional_number(hf: Mapping[str, Any], field: str) -> float | None:
    """A positive finite number, or None where the field is absent or null."""
    return None if hf.get(field) is None else positive(field, hf[field])


def flag(hf: Mapping[str, Any], field: str, default: bool = False) -> bool:
    """true or false; `default` where the field is absent or null."""
    value = hf.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise WeightsError(f"`{field}` of the model's config is {value!r}", "use true or false")
    return value


def positive(field: str, value: Any) -> float:
    """`value` as a float. Raises WeightsError when it is no positive finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise WeightsError(
            f"`{field}` of the model's config is {value!r}", "use a positive finite number"
        )
    return float(value)


def window(hf: Mapping[str, Any], default: int = 4096) -> int | None:
    """`sliding_window`: null looks back without end, absent is `default`."""
    return whole(hf, "sliding_window") if "sliding_window" in hf else default


def tokens(hf: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """Token ids: a number, a list of them, or none."""
    value = hf.get(field)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise WeightsError(
            f"`{field}` of the model's config is {value!r}", "use a token id, or a list of them"
        )
    return tuple(ids)


def first_token(hf: Mapping[str, Any], field: str) -> int | None:
    """The first of the ids of `tokens`."""
    ids = tokens(hf, field)
    return ids[0] if ids else None


def _whole(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WeightsError(
            f"`{field}` of the model's config is {value!r}", "use a whole number >= 1"
        )
    return value
