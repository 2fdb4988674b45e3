"""Errors a user can act on: one line that names what is wrong, and the mend.

The CLI prints `message` and `mend` on one line without a traceback (`--debug` shows it).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 12  # more would not be read


class FivefoldError(Exception):
    """What is wrong (`message`) and what to do about it (`mend`), each without a full stop."""

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message, mend)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message}; {self.mend}" if self.mend else self.message


class ConfigError(FivefoldError):
    """An unknown or ill-typed configuration key or value."""


class LayoutError(FivefoldError):
    """A layout that does not multiply to the world size, or does not divide the model."""


class WeightsError(FivefoldError):
    """Missing, truncated, corrupt or foreign model weights."""


class TokenizerError(FivefoldError):
    """A missing or unreadable tokenizer or chat template."""


class DataError(FivefoldError):
    """Empty, malformed or changed training data."""


class CheckpointError(FivefoldError):
    """A checkpoint that cannot be written, or must not be read."""


class TrainingError(FivefoldError):
    """A run that must stop: a loss that is not a number, a rank that died."""


class PlanError(FivefoldError):
    """A model, cluster or traffic that cannot be planned."""


class PromptError(FivefoldError):
    """A prompt or sampling request that the model cannot take."""


class MissingExtraError(FivefoldError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str, mend: str = "") -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}", mend or f"pip install 'fivefold[{extra}]'"
        )


def one_line(error: object) -> str:
    """The text of an error of others, which may have several lines, on one."""
    return " ".join(str(error).split())


def nearest(name: str, options: Iterable[str]) -> str:
    """A mend for a name that is not among `options`: the closest one, or all of them."""
    known = sorted(options)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(known) > MOST_NAMES:
        known = [*known[:MOST_NAMES], "…"]
    return f"known: {', '.join(known)}" if known else "there are none"
