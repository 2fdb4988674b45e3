"""What a run says: latencies, throughput, goodput, failures, and how honest the client was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.run import OpenLoop, Run
from fivefold.engines.serve.load.slo import Slo, meets

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
LATE = 0.01
"""Seconds of the client's own delay at the 99th percentile from which it is pointed out."""


@dataclass(frozen=True)
class Distribution:
    """Values in short. `percentiles` interpolate linearly, as NumPy's default does."""

    count: int
    mean: float
    low: float
    high: float
    percentiles: Mapping[int, float]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """Of the values that are there; None when there are none."""
        known = np.array([value for value in values if value is not None], np.float64)
        if not len(known):
            return None
        found = np.percentile(known, PERCENTILES).tolist()
        return cls(
            len(known), float(known.mean()), float(known.min()), float(known.max()),
            dict(zip(PERCENTILES, found, strict=True)),
        )  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Of one run. Seconds, and rates a second over the time from first arrival to last end."""

    load: str
    requests: int
    answered: int
    failures: Mapping[str, int]
    """By kind; `examples` has what was said first."""
    examples: Mapping[str, str]
    seconds: float
    offered_rate: float | None
    """Arrivals a second; None where the next waits for an answer."""
    request_throughput: float
    input_throughput: float | None
    output_throughput: float
    input_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    short_answers: int
    """Answers of fewer tokens than asked for."""
    counted_by: Mapping[str, int]
    """How many answers' tokens were counted by the server's usage, and how many by pieces."""
    most_at_once: int
    latencies: Mapping[str, Distribution | None]
    slo: Slo
    goodput: float | None
    """Requests a second that met the SLO; None without one."""
    goodput_share: float | None
    """Of all requests, failures included."""
    lag: Distribution | None
    """How late the client sent."""
    loop_lag: Distribution | None
    """How late the client may have noted what came."""
    interrupted: bool

    @property
    def client_was_late(self) -> bool:
        """Whether the client's own delays are large enough to matter."""
        lags = (self.lag, self.loop_lag)
        return any(lag is not None and lag.percentiles[99] > LATE for lag in lags)

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self) | {"client_was_late": self.client_was_late}


def summarize(run: Run, slo: Slo) -> Summary:
    """Of all requests of a run; latencies and tokens are those of the answered ones."""
    outcomes = [outcome for outcome in run.outcomes if outcome.failure != "cancelled"]
    answered = [outcome for outcome in outcomes if outcome.ok]
    began = min((outcome.scheduled for outcome in outcomes), default=0.0)
    seconds = max((outcome.ended for outcome in outcomes), default=0.0) - began
    seconds = max(seconds, 1e-9)
    inputs = _total(outcome.prompt_tokens for outcome in answered)
    outputs = sum(outcome.completion_tokens for outcome in answered)
    good = sum(meets(outcome, slo) for outcome in outcomes)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    examples: dict[str, str] = {}
    for outcome in failed:
        examples.setdefault(str(outcome.failure), outcome.detail)
    return Summary(
        load=run.load.name,
        requests=len(outcomes),
        answered=len(answered),
        failures=dict(Counter(str(outcome.failure) for outcome in failed).most_common()),
        examples=examples,
        seconds=seconds,
        offered_rate=_offered(run, outcomes),
        request_throughput=len(answered) / seconds,
        input_throughput=None if inputs is None else inputs / seconds,
        output_throughput=outputs / seconds,
        input_tokens=inputs,
        output_tokens=outputs,
        cached_tokens=_total(outcome.cached_tokens for outcome in answered),
        short_answers=sum(outcome.completion_tokens < outcome.asked_output for outcome in answered),
        counted_by=dict(Counter(outcome.counted_by for outcome in answered)),
        most_at_once=most_at_once(outcomes),
        latencies={name: Distribution.of(values(answered, name)) for name in LATENCIES},
        slo=dict(slo),
        goodput=good / seconds if slo else None,
        goodput_share=good / max(1, len(outcomes)) if slo else None,
        lag=Distribution.of(outcome.lag for outcome in outcomes),
        loop_lag=Distribution.of(run.loop_lag),
        interrupted=run.interrupted,
    )


def values(outcomes: Iterable[Outcome], latency: str) -> list[float]:
    """All values of ttft, tpot or e2e; all gaps for itl."""
    if latency == "itl":
        return [gap for outcome in outcomes for gap in outcome.gaps]
    found = (getattr(outcome, latency) for outcome in outcomes)
    return [value for value in found if value is not None]


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """The largest number of requests that were out at a time."""
    return max((count for _, count in in_flight(outcomes)), default=0)


def in_flight(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """(time, requests that are out from then on), at each change."""
    changes = [(outcome.sent, 1) for outcome in outcomes]
    changes += [(outcome.ended, -1) for outcome in outcomes]
    found, count = [], 0
    for when, change in sorted(changes):  # of the same moment, ends come first
        count += change
        found.append((when, count))
    return found


def _offered(run: Run, outcomes: Sequence[Outcome]) -> float | None:
    if not isinstance(run.load, OpenLoop) or len(outcomes) < 2:
        return None
    times = [outcome.scheduled for outcome in outcomes]
    span = max(times) - min(times)
    return (len(times) - 1) / span if span > 0 else None


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum, or None where nothing was counted."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
