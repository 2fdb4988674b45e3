"""What users must get: limits on latencies, written `ttft=500ms,tpot=50ms`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fivefold.core.errors import nearest
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.outcome import Outcome

Slo = Mapping[str, float]
"""Seconds that a latency may take: of ttft, tpot, itl (a request's longest gap), e2e."""

NAMES = ("ttft", "tpot", "itl", "e2e")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
EXAMPLE = "write e.g. --slo ttft=500ms,tpot=50ms"


def parse_slo(text: str) -> dict[str, float]:
    """Limits in seconds. Raises LoadError naming the part that cannot be read."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise LoadError(f"the SLO has {part.strip()!r}, which is no NAME=TIME", EXAMPLE)
        if name not in NAMES:
            raise LoadError(f"the SLO names {name!r}", nearest(name, NAMES))
        if name in limits:
            raise LoadError(f"the SLO limits {name} twice", "leave one out")
        limits[name] = _seconds(name, value)
    return limits


def _seconds(name: str, value: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s)", value)
    if found is None:
        raise LoadError(f"the SLO's {name}={value} is no time", f"{EXAMPLE} (units: us, ms, s)")
    seconds = float(found[1]) * UNITS[found[2]]
    if seconds == 0:
        raise LoadError(f"the SLO's {name}={value} can never be met", "give more than 0")
    return seconds


def meets(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request was answered within all limits. One token has no TPOT and no gap."""
    if not outcome.ok:
        return False
    for name, limit in slo.items():
        value = max(outcome.gaps, default=None) if name == "itl" else getattr(outcome, name)
        if value is not None and value > limit:
            return False
    return True
