"""A report of load runs: one HTML file that fetches nothing, in the look of training reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fivefold.engines.serve.load import curves
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.measures import LATENCIES, PERCENTILES, Summary
from fivefold.engines.serve.load.run import Run
from fivefold.engines.serve.load.table import NAMES, NOTHING, notes
from fivefold.observe import format as as_text
from fivefold.observe.chart import Chart, Drawn, Marks, draw
from fivefold.observe.report import content_policy, for_script, page_part


def write_report(
    path: Path, runs: Sequence[Run], summaries: Sequence[Summary], about: Mapping[str, object]
) -> None:
    """Write the page. `about`: what the load was, shown in a table. Raises LoadError."""
    try:
        path.write_text(render(runs, summaries, about), "utf-8", errors="replace")
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}", "choose another --html") from None


def render(runs: Sequence[Run], summaries: Sequence[Summary], about: Mapping[str, object]) -> str:
    """The page's text. Whatever a server said goes through the template's escaping."""
    data: list[dict[str, Any]] = []

    def figures(charts: Sequence[Chart]) -> list[dict[str, Any]]:
        drawn = [
            draw(chart, (0, 1), Marks())
            for chart in charts
            if any(len(line.points) for line in chart.lines)
        ]
        start = len(data)
        data.extend(for_script(each) for each in drawn)
        return [_figure(each, start + place) for place, each in enumerate(drawn)]

    script = page_part("page.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    sections = [
        {
            "name": summary.load,
            "tiles": tiles(summary),
            "figures": figures(curves.of_run(run, summary)),
            "rows": _rows(summary),
            "notes": notes(summary),
        }
        for run, summary in zip(runs, summaries, strict=True)
    ]
    sweep = figures(curves.of_sweep(runs, summaries))
    page = resources.files("fivefold.engines.serve.load") / "page" / "load.html"
    return environment.from_string(page.read_text("utf-8")).render(
        about=about,
        sections=sections,
        sweep=sweep,
        percentiles=PERCENTILES,
        limited=bool(summaries[0].slo),
        data=data,
        script=Markup(script),
        style=Markup(page_part("page.css")),
        policy=content_policy(script),
    )


def tiles(summary: Summary) -> list[tuple[str, str, str]]:
    """(what, value, remark) of the figures on top."""
    found = [
        ("Answered", f"{summary.answered} of {summary.requests}",
         f"in {as_text.latency(summary.seconds)}, at most {summary.most_at_once} at once"),
        ("Requests per second", as_text.number(summary.request_throughput, 3),
         "" if summary.offered_rate is None else f"{summary.offered_rate:.3g} a second arrived"),
        ("Output tokens per second", as_text.number(summary.output_throughput, 3),
         _input(summary)),
    ]  # fmt: skip
    for name in LATENCIES:
        values = summary.latencies[name]
        if values is not None and name != "itl":
            found.append(
                (NAMES[name][0].upper() + NAMES[name][1:], as_text.latency(values.percentiles[50]),
                 f"median; p99 {as_text.latency(values.percentiles[99])}")
            )  # fmt: skip
    if summary.goodput is not None and summary.goodput_share is not None:
        limits = ", ".join(f"{k} {as_text.latency(v)}" for k, v in summary.slo.items())
        found.append(
            ("Goodput per second", as_text.number(summary.goodput, 3),
             f"{as_text.share(summary.goodput_share)} within {limits}")
        )  # fmt: skip
    return found


def _input(summary: Summary) -> str:
    if summary.input_throughput is None:
        return ""
    text = f"{as_text.count(summary.input_throughput)} prompt tokens"
    if summary.cached_tokens and summary.input_tokens:
        text += f", {as_text.share(summary.cached_tokens / summary.input_tokens)} cached"
    return text


def _figure(drawn: Drawn, index: int) -> dict[str, Any]:
    return {"drawn": drawn, "svg": Markup(drawn.svg), "index": index}  # its labels are escaped


def _rows(summary: Summary) -> list[tuple[str, list[str]]]:
    rows = [(NAMES[name], summary.latencies[name]) for name in LATENCIES]
    rows += [("client late to send", summary.lag), ("client busy elsewhere", summary.loop_lag)]
    found = []
    for name, values in rows:
        if values is None:
            found.append((name, [NOTHING] * (len(PERCENTILES) + 2)))
            continue
        shown = [values.mean, *(values.percentiles[p] for p in PERCENTILES), values.high]
        found.append((name, [as_text.latency(value) for value in shown]))
    return found
