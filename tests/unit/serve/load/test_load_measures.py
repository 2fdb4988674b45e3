"""Summaries: percentiles by their definition, goodput, failures, the client's own lag."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_cases import answered, failed, run_of

from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.measures import (
    LATENCIES,
    PERCENTILES,
    Distribution,
    in_flight,
    most_at_once,
    summarize,
)
from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.slo import meets, parse_slo

SECONDS = st.floats(0, 100)
OUTCOMES = st.lists(
    st.builds(answered, SECONDS, SECONDS, st.lists(SECONDS, max_size=4).map(tuple))
    | st.builds(failed, SECONDS),
    min_size=1, max_size=12,
)  # fmt: skip
SLOS = st.dictionaries(st.sampled_from(["ttft", "tpot", "itl", "e2e"]), SECONDS, min_size=1)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_percentiles_interpolate_between_neighbours(values: list[float]) -> None:
    found = Distribution.of(values)
    assert found is not None
    ordered = sorted(values)
    for percent in PERCENTILES:
        place = (len(values) - 1) * percent / 100
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        expected = low + (high - low) * (place - math.floor(place))
        assert found.percentiles[percent] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    shown = [found.low, *found.percentiles.values(), found.high]
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(shown))


def test_values_that_are_missing_are_left_out() -> None:
    found = Distribution.of([None, 1.0, None, 3.0])
    assert found is not None and (found.count, found.mean) == (2, 2.0)
    assert Distribution.of([None]) is None


@settings(deadline=None, derandomize=True, max_examples=50)
@given(OUTCOMES, SLOS, st.data())
def test_goodput_grows_with_the_limits(
    outcomes: list[Outcome], slo: dict[str, float], data: st.DataObject
) -> None:
    run = run_of(*outcomes)
    strict = summarize(run, slo)
    loose = summarize(run, {name: limit + data.draw(SECONDS) for name, limit in slo.items()})
    fewer = summarize(run, dict(list(slo.items())[1:]) or {"ttft": math.inf})
    assert strict.goodput is not None and loose.goodput is not None and fewer.goodput is not None
    assert strict.goodput <= loose.goodput
    if len(slo) > 1:
        assert strict.goodput <= fewer.goodput
    assert loose.goodput <= loose.request_throughput + 1e-12
    assert strict.goodput_share == sum(meets(o, slo) for o in outcomes) / len(outcomes)
    everything = summarize(run, dict.fromkeys(slo, math.inf))
    assert everything.goodput == everything.request_throughput


def test_a_run_in_numbers() -> None:
    run = run_of(
        answered(0.0, 0.5, (0.25, 0.25)), answered(1.0, 1.0, (0.5, 0.5), cached_tokens=6),
        failed(1.5, "status 429", 0.1), failed(1.5, "timeout", 2.5), failed(1.6, "timeout", 0.1),
        answered(3.0, 0.5, (), completion_tokens=1, asked_output=4, sent=3.2), open_loop=True,
    )  # fmt: skip
    found = summarize(run, {"ttft": 0.75, "tpot": 1.0})
    assert (found.requests, found.answered, found.seconds) == (6, 3, 4.0)
    assert found.failures == {"timeout": 2, "status 429": 1}
    assert found.examples["timeout"] == "timeout!"
    assert found.offered_rate == pytest.approx(5 / 3)
    assert (found.request_throughput, found.output_throughput) == (0.75, 7 / 4)
    assert (found.input_tokens, found.input_throughput, found.cached_tokens) == (24, 6.0, 6)
    assert found.goodput == 0.5 and found.goodput_share == pytest.approx(1 / 3)
    assert found.short_answers == 1 and found.counted_by == {"usage": 3}
    ttft, itl = found.latencies["ttft"], found.latencies["itl"]
    assert ttft is not None and ttft.percentiles[50] == 0.5 and ttft.high == 1.0
    assert itl is not None and itl.count == 4
    assert found.lag is not None and found.lag.high == pytest.approx(0.2)
    assert found.client_was_late
    json.dumps(found.record(), allow_nan=False)


def test_a_late_client_hides_nothing() -> None:
    """The server answered 0.1 s after it was asked, but the user had waited for 2 s."""
    outcome = answered(1.0, 2.0, ())
    outcome.sent = 2.9
    assert outcome.ttft == 2.0 and outcome.lag == pytest.approx(1.9)


def test_nothing_was_answered() -> None:
    found = summarize(run_of(failed(), failed(kind="unreachable")), {"ttft": 1.0})
    assert (found.answered, found.goodput, found.output_throughput) == (0, 0.0, 0.0)
    assert all(found.latencies[name] is None for name in LATENCIES)
    empty = summarize(run_of(), {})
    assert (empty.requests, empty.goodput, empty.lag) == (0, None, None)
    json.dumps(empty.record(), allow_nan=False)


def test_what_was_cancelled_does_not_count() -> None:
    found = summarize(run_of(answered(), failed(kind="cancelled", after=99)), {})
    assert (found.requests, found.failures, found.seconds) == (1, {}, pytest.approx(0.7))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(OUTCOMES)
def test_requests_out_at_once(outcomes: list[Outcome]) -> None:
    found = in_flight(outcomes)
    assert found[-1][1] == 0 and len(found) == 2 * len(outcomes)
    whole = [o for o in outcomes if o.ended > o.sent]
    for outcome in whole:  # the peak is at a start
        out = sum(o.sent <= outcome.sent < o.ended for o in whole)
        assert most_at_once(outcomes) >= out
    assert most_at_once([answered(0.0), answered(0.6), answered(0.7)]) == 2  # 0.7: one ends


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ttft=500ms,tpot=50ms", {"ttft": 0.5, "tpot": 0.05}),
        (" e2e = 1.5s , itl=250us", {"e2e": 1.5, "itl": 0.00025}),
    ],
)
def test_slos(text: str, wanted: dict[str, float]) -> None:
    assert parse_slo(text) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "the SLO has '', which is no NAME=TIME"),
        (
            "ttft",
            "the SLO has 'ttft', which is no NAME=TIME; write e.g. --slo ttft=500ms,tpot=50ms",
        ),
        ("tftt=1s", "the SLO names 'tftt'; did you mean 'ttft'?"),
        ("ttft=500", r"ttft=500 is no time; .* \(units: us, ms, s\)"),
        ("ttft=-1s", "ttft=-1s is no time"),
        ("ttft=nans", "is no time"),
        ("ttft=0ms", "ttft=0ms can never be met"),
        ("ttft=1s,ttft=2s", "limits ttft twice"),
        ("ttft=1s,", "the SLO has ''"),
    ],
)
def test_slos_that_cannot_be_read(text: str, wanted: str) -> None:
    with pytest.raises(LoadError, match=wanted):
        parse_slo(text)
