"""Holding what a source stores to what its configuration asks for, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.core.errors import WeightsError
from fivefold.weights.source import ModelSource

_SHOWN = 3


def check_tensors(source: ModelSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WeightsError for tensors that are missing, unexpected or of another shape.

    `expected`: the shape of every parameter, by our names.
    """
    stored = source.entries()
    strangers = source.strangers()
    missing = [name for name in expected if name not in stored]
    family = source.config.family
    if strangers and len(missing) > len(expected) // 2:
        raise WeightsError(
            f"{source.path} holds the weights of another architecture ({listed(strangers)}), "
            f"but its configuration says {family}",
            "use the configuration that belongs to the weights",
        )
    if missing:
        raise WeightsError(
            f"{source.path} lacks {len(missing)} of {len(expected)} tensors: {listed(missing)}",
            "copy it again from the model's origin, or mend its configuration",
        )
    unexpected = strangers + [stored[name].name for name in stored if name not in expected]
    if unexpected:
        raise WeightsError(
            f"{source.path} holds tensors that a {family} decoder of its configuration does not "
            f"have: {listed(unexpected)}",
            "use the configuration that belongs to the weights",
        )
    for name, shape in expected.items():
        entry = stored[name]
        if entry.shape != shape:
            raise WeightsError(
                f"{entry.name} in {entry.file} has shape {list(entry.shape)}, "
                f"but the configuration makes it {list(shape)}",
                "use the configuration that belongs to the weights",
            )


def listed(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
