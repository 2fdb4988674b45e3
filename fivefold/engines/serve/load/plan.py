"""From settings to what is sent when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.engines.serve.load import arrivals
from fivefold.engines.serve.load.run import ClosedLoop, Load, OpenLoop
from fivefold.engines.serve.load.settings import TRACES, LoadSettings
from fivefold.engines.serve.load.traces import TraceRow, read_azure, read_mooncake
from fivefold.engines.serve.load.workload import Asked, from_file, from_trace, made_up

REQUESTS = 100
MOST = 10_000
"""Requests of a closed loop that only `duration` ends."""


@dataclass(frozen=True)
class Planned:
    """One run: what is asked, and when."""

    asked: Sequence[Asked]
    load: Load


def plan(settings: LoadSettings) -> list[Planned]:
    """A run for each rate or number of users. Raises LoadError for files that are wrong."""
    if settings.rates:
        return [_at_rate(settings, rate, place) for place, rate in enumerate(settings.rates)]
    if settings.workload in TRACES and not settings.concurrency:
        asked = _asked(settings, settings.requests or MOST * MOST, 0)
        name = "trace" if settings.speed == 1 else f"trace, {settings.speed:g} times as fast"
        return [Planned(asked, OpenLoop([each.at or 0.0 for each in asked], name))]
    count = settings.requests or (REQUESTS if settings.duration is None else MOST)
    return [
        Planned(_asked(settings, count, place), ClosedLoop(users))
        for place, users in enumerate(settings.concurrency or (1,))
    ]


def warm_up(settings: LoadSettings, planned: Planned) -> list[Asked]:
    """A few requests of the same lengths; given texts stay unknown to the server."""
    first = list(planned.asked[: settings.warmup])
    if all(each.text is None for each in first):
        return first
    return made_up(len(first), settings.input_tokens, settings.output_tokens)


def shortened(settings: LoadSettings) -> tuple[int, int]:
    """How many of how many rows of a trace its limits cut."""
    rows = _rows(settings)[: settings.requests]
    return sum(settings.fit.cuts(row) for row in rows), len(rows)


def _at_rate(settings: LoadSettings, rate: float, place: int) -> Planned:
    count = settings.requests or REQUESTS
    if settings.requests is None and settings.duration is not None:
        mean = max(0.0, rate * settings.duration)
        count = math.ceil(mean + 6 * math.sqrt(mean)) + 10  # those after `duration` are not sent
    asked = _asked(settings, count, place)
    if settings.arrivals == "fixed":
        return Planned(asked, OpenLoop(arrivals.fixed(len(asked), rate), f"{rate:g}/s even"))
    times = arrivals.poisson(len(asked), rate, settings.seed + place)
    return Planned(asked, OpenLoop(times, f"{rate:g}/s Poisson"))


def _asked(settings: LoadSettings, count: int, place: int) -> list[Asked]:
    if settings.workload in TRACES:
        return from_trace(_rows(settings)[:count], settings.fit, settings.speed)
    if settings.workload == "file":
        assert settings.prompts is not None
        return from_file(settings.prompts, count, settings.output_tokens)
    return made_up(
        count,
        settings.input_tokens,
        settings.output_tokens,
        spread=settings.spread if settings.workload == "random" else 0.0,
        shared_prefix=settings.shared_prefix,
        prefixes=settings.prefixes,
        seed=settings.seed + place,
    )


def _rows(settings: LoadSettings) -> list[TraceRow]:
    assert settings.trace is not None
    return (read_azure if settings.workload == "azure" else read_mooncake)(settings.trace)
