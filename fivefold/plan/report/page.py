"""The page: memory, time, pipeline, topology and front of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from fivefold.observe import format as as_text
from fivefold.observe.chart import Across, Chart, Line, Marks, draw
from fivefold.observe.report import content_policy, for_script, page_part
from fivefold.plan.explain.compare import differences, verdict
from fivefold.plan.explain.notes import arithmetic, notes
from fivefold.plan.explain.record import bill
from fivefold.plan.explain.table import cost_in_words
from fivefold.plan.memory.parts import PARTS
from fivefold.plan.report.bars import memory_bars, waterfall
from fivefold.plan.report.page_text import PAGE, STYLE
from fivefold.plan.report.timeline import picture
from fivefold.plan.report.topology import COLOURS, Axis, axes, topology
from fivefold.plan.search.answer import Answer
from fivefold.plan.search.found import Found, say


def page(answer: Answer) -> str:
    """Self-contained HTML. Whatever came from the user goes through the template's escaping."""
    winner, script = answer.winner, page_part("page.js")
    charts = [draw(chart, (0, 1), Marks()) for chart in _charts(answer)]
    pipeline = picture(winner)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(
        answer=answer,
        winner=winner,
        best=say(winner.strategy),
        tiles=tiles(winner),
        notes=notes(answer),
        arithmetic=arithmetic(answer),
        memory=Markup(memory_bars(winner.memory, winner.job.cluster.device.memory)),
        legend=PARTS,
        waterfall=Markup(waterfall(winner.time.pieces, winner.seconds)),
        pipeline=None if pipeline is None else Markup(pipeline[0]),
        pipeline_title="" if pipeline is None else pipeline[1],
        topology=Markup(topology(winner)),
        axes=[_axis_row(each) for each in axes(winner)],
        charts=[{"drawn": d, "svg": Markup(d.svg), "index": i} for i, d in enumerate(charts)],
        ranking=_ranking(answer),
        compared=_compared(answer),
        data=[for_script(d) for d in charts],
        script=Markup(script),
        style=Markup(page_part("page.css") + STYLE),
        policy=content_policy(script),
    )


def tiles(found: Found) -> list[tuple[str, str, str]]:
    """(what, value, remark) of the figures on top."""
    time, job = found.time, found.job
    memory = job.cluster.device.memory
    shown = [
        (
            "A step",
            as_text.latency(time.total),
            f"±{time.error:.0%}, as such predictions have been",
        ),
        ("MFU", f"{time.mfu:.1%}", f"{time.flops_per_device / 1e12:.0f} TFLOP/s a device"),
        ("Tokens per second", as_text.count(time.tokens_per_second), f"on {job.devices:,} devices"),
        ("Memory", as_text.size(found.bytes), f"of {as_text.size(memory)} on the fullest device"),
    ]
    for name, spot in (("The run", False), ("On spot", True)):
        cost = bill(found, spot=spot)
        if cost is not None:
            value = f"{cost.days:.3g} days"
            if not isfinite(cost.days):
                value = "no end"
            elif cost.dollars is not None:
                value = f"${as_text.count(cost.dollars)}"
            shown.append((name, value, cost_in_words(cost)))
    return shown


def _axis_row(axis: Axis) -> dict[str, Any]:
    there = axis.group
    return {
        "name": axis.name,
        "colour": COLOURS[axis.name],
        "ways": axis.ways,
        "where": f"{there.inside} in a domain"
        + (f" x {there.domains} domains" if there.crosses else ""),
        "link": there.where,
        "rate": f"{axis.rate / 1e9:.0f} GB/s",
        "exposed": as_text.latency(axis.exposed),
        "hidden": as_text.latency(axis.hidden),
    }


def _ranking(answer: Answer) -> list[tuple[str, str, str, str, str, str]]:
    rows = []
    for place, each in enumerate(answer.ranking, 1):
        why = "" if each is answer.winner else verdict(answer.winner, each)
        rows.append((str(place), *_row(each), why))
    if answer.guess is not None and answer.guess not in answer.ranking:
        why = verdict(answer.winner, answer.guess) if answer.guess.fits else "does not fit"
        rows.append(("yours", *_row(answer.guess), why))
    return rows


def _row(found: Found) -> tuple[str, str, str, str]:
    return (
        say(found.strategy).replace(",", ", "), as_text.latency(found.seconds),
        f"{found.time.mfu:.1%}", as_text.size(found.bytes),
    )  # fmt: skip


def _compared(answer: Answer) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """Piece by piece against the runner-up and the user's own."""
    found = []
    for name, other in (("the runner-up", answer.runner_up), ("your layout", answer.guess)):
        if other is None or other.strategy == answer.winner.strategy:
            continue
        rows = [
            (each.piece, f"{each.seconds:+.3g} s", f"{each.share:+.1%}", each.why)
            for each in differences(answer.winner, other)
        ]
        found.append((f"{name}: {say(other.strategy).replace(',', ', ')}", rows))
    return found


def _charts(answer: Answer) -> list[Chart]:
    """Time over memory; time over what a step costs, where fewer devices were looked at."""
    whole = [each for each in answer.front if each.job.devices == answer.job.devices]
    memory = Chart(
        "Time of a step over memory", "seconds",
        _lines(answer, whole, lambda f: f.bytes),
        across=Across(
            "memory of the fullest device", "bytes", limits=(answer.job.cluster.device.memory,)
        ),
    )  # fmt: skip
    sizes = {each.job.devices for each in answer.front}
    if len(sizes) == 1:
        return [memory]
    cost = Chart(
        "Time of a step over its cost", "seconds",
        _lines(answer, answer.front, lambda f: f.device_seconds / 3600),
        across=Across("device hours a step", "number", from_zero=False),
    )  # fmt: skip
    return [memory, cost]


def _lines(answer: Answer, front: Sequence[Found], measure: Any) -> list[Line]:
    guess = [] if answer.guess is None else [answer.guess]
    groups = [
        ("front", "raw", front, False),
        ("other shapes", "raw faint", [f for f in answer.ranking if f not in front], False),
        ("best", "mean", [answer.winner], False),
        ("yours", "held-out", guess, False),
    ]
    return [
        Line(name, style, np.array(sorted((measure(f), f.seconds) for f in members)), joined)
        for name, style, members, joined in groups
        if members
    ]
