"""`report.html` of a run: one file without a single request to anywhere, drawn from its records."""

from __future__ import annotations

import base64
import hashlib
import os
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fivefold.core.errors import DataError
from fivefold.observe import summary
from fivefold.observe.chart import Chart, Drawn, Line, Marks, draw
from fivefold.observe.metrics import METRICS
from fivefold.observe.run_records import RunRecords, read_run
from fivefold.observe.series import Curve, smooth, smoothing_window

REPORT = "report.html"
SAMPLES_SHOWN = 24


def write_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html from what the run recorded so far, and return its path.

    Raises DataError when the folder holds no step's record, a damaged one, or cannot be written.
    """
    run = read_run(run_dir)
    if not run.metrics:
        raise DataError(f"{run_dir / METRICS} holds no step yet", "wait for the first one")
    path = run_dir / REPORT
    partial = path.with_name(f"{REPORT}.{os.getpid()}.partial")
    try:
        partial.write_text(render(run), "utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DataError(f"cannot write {path}: {error.strerror}", "free disk space") from None
    return path


def render(run: RunRecords) -> str:
    """The page. Everything from the run's files goes through the template's escaping."""
    script, style = page_part("page.js"), page_part("page.css")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    marks = Marks(run.resumes, run.checkpoints, run.not_finite)
    steps = (run.metrics[0]["step"], run.metrics[-1]["step"])
    shown, absent = [], []
    for chart in charts(run):
        if any(len(line.points) for line in chart.lines):
            shown.append(draw(chart, steps, marks))
        else:
            absent.append(chart.title)
    return environment.from_string(
        page_part("page.html")
    ).render(
        run=run,
        status=summary.status(run),
        tiles=summary.tiles(run),
        charts=[{"drawn": d, "svg": Markup(d.svg)} for d in shown],  # its labels are escaped
        data=[for_script(d) for d in shown],
        absent=absent,
        marks=marks,
        history=summary.history(run),
        hardware=summary.hardware(run),
        samples=run.samples[-SAMPLES_SHOWN:],
        script=Markup(script),
        style=Markup(style),
        policy=content_policy(script),
    )


def charts(run: RunRecords) -> list[Chart]:
    """What is drawn, in this order; charts without a point are named but not drawn."""
    return [
        Chart(
            "Loss (nats per token)",
            "number",
            [*_with_mean(run.curve("loss"), "train"),
             Line("held-out", "held-out", run.held_out)],
            may_log=True,
        ),
        Chart("Throughput (tokens per second)", "count",
              _with_mean(run.curve("tokens_per_second"), "tok/s"), from_zero=True),
        Chart("MFU (share of measured peak)", "share",
              _with_mean(run.curve("mfu"), "MFU"), from_zero=True),
        Chart("Gradient norm before clipping", "number",
              _with_mean(run.curve("grad_norm"), "norm"), from_zero=True, may_log=True),
        Chart("Learning rate", "number",
              [Line("lr", "raw", run.curve("lr"))], from_zero=True),
        Chart("Peak memory of rank 0", "bytes",
              [Line("memory", "raw", run.curve("memory_bytes"))], from_zero=True),
        *_loss_scale(run),
    ]  # fmt: skip


def _with_mean(points: Curve, label: str) -> list[Line]:
    window = smoothing_window(len(points))
    if window == 1:
        return [Line(label, "raw", points)]
    return [
        Line(label, "raw faint", points),
        Line(f"mean of {window} steps", "mean", smooth(points, window)),
    ]


def _loss_scale(run: RunRecords) -> list[Chart]:
    """Of fp16 runs alone: others have no such scale to be missed."""
    points = run.curve("loss_scale")
    chart = Chart("Loss scale (fp16)", "count", [Line("scale", "raw", points)], from_zero=True)
    return [chart] if len(points) else []


def for_script(drawn: Drawn) -> dict[str, Any]:
    """What page.js needs of a chart."""
    return {"title": drawn.title, "across": drawn.across, "lines": drawn.lines}


def content_policy(script: str) -> str:
    """A content policy: nothing is fetched, and no script but the page's own runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def page_part(name: str) -> str:
    """A file of the page."""
    return (resources.files("fivefold.observe") / "page" / name).read_text("utf-8")
