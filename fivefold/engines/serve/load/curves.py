"""What a report of a load draws, as curves of (x, y) in order of x."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fivefold.engines.serve.load.measures import Summary, in_flight, values
from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.run import ClosedLoop, Run
from fivefold.observe.chart import Across, Chart, Line
from fivefold.observe.series import Curve

BINS = 120
SMALLEST_BIN = 0.1  # seconds
SHORTEST = 1e-4  # seconds: pieces that came together have no gap, which no log axis shows
TITLES = (
    ("ttft", "Time to first token (TTFT)"),
    ("tpot", "Time per output token (TPOT)"),
    ("itl", "Time between pieces (ITL)"),
    ("e2e", "Time of a whole answer (e2e)"),
)
TIME = Across("time", "seconds")


def of_run(run: Run, summary: Summary) -> list[Chart]:
    """Charts of one run; those without a point are not drawn."""
    answered = [outcome for outcome in run.outcomes if outcome.ok]
    slo = summary.slo
    return [
        *(_within(title, values(answered, name), name, slo.get(name)) for name, title in TITLES),
        Chart("TTFT by time of arrival", "seconds",
              [_dots(answered, lambda outcome: outcome.scheduled)],
              from_zero=True, may_log=True, across=TIME),
        Chart("TTFT by length of prompt", "seconds",
              [_dots(answered, lambda outcome: outcome.prompt_tokens)],
              from_zero=True, may_log=True, across=Across("prompt tokens", "count")),
        Chart("Requests out at once", "count", [Line("requests", "raw", _staircase(run.outcomes))],
              from_zero=True, across=TIME),
        Chart("Output tokens per second", "count",
              [Line("tokens", "raw", token_rate(answered, summary.seconds))],
              from_zero=True, across=TIME),
    ]  # fmt: skip


def of_sweep(runs: Sequence[Run], summaries: Sequence[Summary]) -> list[Chart]:
    """How latencies and throughput move with the load; nothing for a single run."""
    closed = isinstance(runs[0].load, ClosedLoop)
    across = Across("users" if closed else "arrivals per second", "number", from_zero=True)
    places = [
        float(run.load.concurrency) if isinstance(run.load, ClosedLoop) else summary.offered_rate
        for run, summary in zip(runs, summaries, strict=True)
    ]
    if len(runs) < 2 or None in places:
        return []

    def line(label: str, style: str, found: Sequence[float | None]) -> Line:
        pairs = zip(places, found, strict=True)
        return Line(label, style, _sorted(list(pairs)))

    def percentile(name: str, percent: int) -> list[float | None]:
        found = [summary.latencies[name] for summary in summaries]
        return [None if each is None else each.percentiles[percent] for each in found]

    charts = [
        Chart(title, "seconds", [line("p50", "raw", percentile(name, 50)),
                                 line("p99", "held-out", percentile(name, 99))],
              from_zero=True, may_log=True, across=across)
        for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "Whole answer (e2e)"))
    ]  # fmt: skip
    rates = [line("answered", "raw", [summary.request_throughput for summary in summaries])]
    if summaries[0].slo:
        rates.append(line("within the SLO", "held-out", [s.goodput for s in summaries]))
    charts.append(Chart("Requests per second", "number", rates, from_zero=True, across=across))
    tokens = [line("tokens", "raw", [summary.output_throughput for summary in summaries])]
    return [
        *charts, Chart("Output tokens per second", "count", tokens, from_zero=True, across=across)
    ]  # fmt: skip


def shares(found: Sequence[float]) -> Curve:
    """(value, share of all at most as large): an empirical distribution."""
    ordered = np.sort(np.array(found, np.float64))
    return np.column_stack([ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered))])


def token_rate(answered: Sequence[Outcome], seconds: float) -> Curve:
    """Tokens a second over time: each piece counts as many as its answer's pieces do on average."""
    width = max(SMALLEST_BIN, seconds / BINS)
    found: dict[int, float] = {}
    for outcome in answered:
        if outcome.first is None:
            continue
        times = outcome.first + np.concatenate([[0.0], np.cumsum(outcome.gaps)])
        each = outcome.completion_tokens / len(times)
        for place in (times / width).astype(int).tolist():
            found[place] = found.get(place, 0.0) + each / width
    if not found:
        return np.zeros((0, 2))
    return np.array([((i + 0.5) * width, found.get(i, 0.0)) for i in range(max(found) + 1)])


def _within(title: str, found: Sequence[float], name: str, limit: float | None) -> Chart:
    across = Across("within", "seconds", may_log=True, limits=() if limit is None else (limit,))
    drawn = np.maximum(np.array(found, np.float64), SHORTEST)
    lines = [Line(name.upper(), "raw", shares(drawn.tolist()))]
    return Chart(title, "share", lines, from_zero=True, across=across)


def _dots(answered: Sequence[Outcome], place: Callable[[Outcome], float | None]) -> Line:
    pairs = [(place(outcome), outcome.ttft) for outcome in answered]
    return Line("TTFT", "raw", _sorted(pairs), joined=False)


def _staircase(outcomes: Sequence[Outcome]) -> Curve:
    points: list[tuple[float | None, float | None]] = []
    before = 0
    for when, count in in_flight(outcomes):
        points += [(when, before), (when, count)]
        before = count
    return _sorted(points)


def _sorted(pairs: Sequence[tuple[float | None, float | None]]) -> Curve:
    """Those pairs of which both are known."""
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    return np.array(sorted(known, key=lambda pair: pair[0]), np.float64).reshape(-1, 2)
