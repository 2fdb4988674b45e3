"""A serving plan as one HTML file that fetches nothing, in the look of the other reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from fivefold.engines.serve.load import curves
from fivefold.engines.serve.load.report import tiles
from fivefold.engines.serve.load.run import OpenLoop, Run
from fivefold.observe.chart import Across, Chart, Line, Marks, draw
from fivefold.observe.report import content_policy, for_script, page_part
from fivefold.plan.serving.bars import stack, waterfall
from fivefold.plan.serving.explain import KINDS
from fivefold.plan.serving.page_text import TEMPLATE
from fivefold.plan.serving.report import BAND, Report

GIB = 2**30
AT_ONCE = Across("answers at once", "count", may_log=True)


def page(report: Report) -> str:
    """The page's text."""
    data: list[dict[str, Any]] = []

    def figures(charts: Sequence[Chart]) -> list[dict[str, Any]]:
        drawn = [
            draw(chart, (0, 1), Marks())
            for chart in charts
            if any(len(line.points) for line in chart.lines)
        ]
        start = len(data)
        data.extend(for_script(each) for each in drawn)
        return [
            {"drawn": each, "svg": Markup(each.svg), "index": start + place}
            for place, each in enumerate(drawn)
        ]

    script = page_part("page.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    by_batch = figures(_by_batch(report))
    simulated, shown = _simulated(report)
    return environment.from_string(TEMPLATE).render(
        report=report,
        options=_options(report),
        memory=Markup(_memory(report)),
        step=Markup(_step(report)),
        by_batch=by_batch,
        tiles=shown,
        simulated=figures(simulated),
        traffic="" if report.simulation is None else report.simulation.traffic.name,
        band=BAND,
        data=data,
        script=Markup(script),
        style=Markup(page_part("page.css")),
        policy=content_policy(script),
    )


def _by_batch(report: Report) -> list[Chart]:
    points = report.points

    def line(label: str, style: str, values: Sequence[float]) -> Line:
        pairs = [(point.batch, value) for point, value in zip(points, values, strict=True)]
        return Line(label, style, np.array(pairs, np.float64))

    return [
        Chart("Time per output token (TPOT)", "seconds",
              [line("TPOT", "raw", [p.tpot for p in points]),
               line("a step without prompts", "held-out", [p.step for p in points])],
              from_zero=True, across=AT_ONCE),
        Chart("Time to first token (TTFT), no queue", "seconds",
              [line("TTFT", "raw", [p.ttft for p in points])], from_zero=True, across=AT_ONCE),
        Chart("Output tokens per second of an engine", "count",
              [line("tokens", "raw", [p.tokens_per_second for p in points])],
              from_zero=True, across=AT_ONCE),
    ]  # fmt: skip


def _simulated(report: Report) -> tuple[list[Chart], list[tuple[str, str, str]]]:
    run = report.simulation
    if run is None:
        return [], []
    summary = run.summary(report.question.limits)
    load = OpenLoop([each.scheduled for each in run.outcomes], run.traffic.name)
    return curves.of_run(Run(load, run.outcomes), summary), tiles(summary)


def _options(report: Report) -> list[list[str]]:
    found = []
    for option in () if report.plan is None else report.plan.options:
        dollars = option.dollars(report.cluster)
        ttft, tpot = (option.summary.latencies[name] for name in ("ttft", "tpot"))
        found.append([
            option.name + ("" if option.fits else " (does not fit)"),
            str(option.devices),
            "-" if ttft is None else f"{ttft.percentiles[95] * 1e3:.0f} ms",
            "-" if tpot is None else f"{tpot.percentiles[95] * 1e3:.1f} ms",
            f"{option.share:.1%}",
            f"{option.most:.3g}",
            "-" if dollars is None else f"{dollars:.2f}",
        ])  # fmt: skip
    return found


def _memory(report: Report) -> str:
    room = report.room
    beside = room.memory - room.weights - room.step - room.reserve - room.cache
    parts = [
        ("weights", room.weights), ("keys and values", room.cache), ("a step", room.step),
        ("graphs, workspaces, fragments", room.reserve), ("left free", max(0.0, beside)),
    ]  # fmt: skip
    told = [(name, size, f"{size / GIB:.2f} GiB") for name, size in parts]
    return stack("Memory of a device", told)


def _step(report: Report) -> str:
    cost = report.cost
    parts = [(KINDS[each.name], getattr(cost, each.name)) for each in fields(cost)]
    told = [(name, size, f"{size * 1e3:.2f} ms") for name, size in parts if size > 0]
    return waterfall("Time of a step", told)
