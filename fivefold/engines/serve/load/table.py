"""A run's summary for people: one column a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fivefold.engines.serve.load.measures import LATENCIES, PERCENTILES, Distribution, Summary
from fivefold.observe import format as as_text

NAMES = {
    "ttft": "first token (TTFT)",
    "tpot": "per output token (TPOT)",
    "itl": "between pieces (ITL)",
    "e2e": "whole answer (e2e)",
}
NOTHING = "–"


def print_summaries(summaries: Sequence[Summary], console: Console) -> None:
    """Throughput of each run in a row, then latencies a run, then what to be careful about."""
    console.print(throughput(summaries))
    for summary in summaries:
        console.print()
        console.print(latencies(summary, named=len(summaries) > 1))
    for note in dict.fromkeys(note for summary in summaries for note in notes(summary)):
        console.print(Text(note, style="yellow"), soft_wrap=True)


def throughput(summaries: Sequence[Summary]) -> Table:
    """Requests, tokens and goodput a second."""
    table = Table(box=None, header_style="bold")
    table.add_column("\nload", no_wrap=True)
    with_slo = any(summary.slo for summary in summaries)
    heads = ["\nanswered", "\ntook", "requests\n/s", "tokens\nin/s", "tokens\nout/s"]
    for head in [*heads, *(["goodput\n/s", "within\nSLO"] if with_slo else [])]:
        table.add_column(head, justify="right", no_wrap=True)
    for summary in summaries:
        cells = [
            summary.load,
            f"{summary.answered}/{summary.requests}",
            as_text.latency(summary.seconds),
            as_text.number(summary.request_throughput, 3),
            _count(summary.input_throughput),
            as_text.number(summary.output_throughput, 3),
        ]
        if with_slo:
            cells += [as_text.number(summary.goodput or 0.0, 3), _share(summary.goodput_share)]
        table.add_row(*cells)
    return table


def latencies(summary: Summary, *, named: bool) -> Table:
    """Mean and percentiles of each latency."""
    table = Table(box=None, header_style="bold")
    table.add_column(summary.load if named else "time", no_wrap=True)
    for head in ("mean", *(f"p{percent}" for percent in PERCENTILES), "most"):
        table.add_column(head, justify="right", no_wrap=True)
    for name in LATENCIES:
        table.add_row(NAMES[name], *_cells(summary.latencies[name]))
    table.add_row("client late to send", *_cells(summary.lag), style="dim")
    table.add_row("client busy elsewhere", *_cells(summary.loop_lag), style="dim")
    return table


def notes(summary: Summary) -> list[str]:
    """What the figures do not show."""
    found = [
        f"failed: {count} x {kind}: {summary.examples[kind]}"
        for kind, count in summary.failures.items()
    ]
    if summary.interrupted:
        found.append("interrupted: only what had ended by then is counted")
    if summary.client_was_late:
        worst = max(lag.percentiles[99] for lag in (summary.lag, summary.loop_lag) if lag)
        found.append(
            f"the client was late by {as_text.latency(worst)} (p99): its times include that; use"
            " another machine or a lower rate"
        )
    if summary.short_answers:
        found.append(f"{summary.short_answers} answers were shorter than asked for")
    if summary.counted_by.get("pieces"):
        found.append("the server reports no usage: each piece is taken for a token")
    return found


def _cells(found: Distribution | None) -> list[str]:
    if found is None:
        return [NOTHING] * (len(PERCENTILES) + 2)
    shown = [found.mean, *(found.percentiles[percent] for percent in PERCENTILES), found.high]
    return [as_text.latency(value) for value in shown]


def _count(value: float | None) -> str:
    return NOTHING if value is None else as_text.count(value)


def _share(value: float | None) -> str:
    return NOTHING if value is None else as_text.share(value)
