"""A serving plan in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fivefold.engines.serve.load.measures import Summary
from fivefold.plan.serving.report import BAND, Report
from fivefold.plan.serving.simulate import Simulation

GIB = 2**30


def print_report(report: Report, console: Console, explained: bool) -> None:
    """Options, the engine's room and curve, latencies; with `explained` the arithmetic."""
    shape, engine = report.shape, report.engine
    console.print(
        f"{shape.name} on {report.cluster.name}, weights {engine.weights}, keys and values"
        f" {engine.kv}, as {engine.system.name} runs it",
        soft_wrap=True,
    )
    for note in getattr(shape, "notes", ()):
        console.print(f"note: {note}", style="dim", soft_wrap=True)
    if report.plan is not None:
        console.print(_options(report))
        best = report.plan.best
        console.print(
            f"take {best.name}: {best.devices} devices, {best.share:.1%} of requests within"
            f" the limits at {best.rate:.3g} requests/s; it takes about {best.most:.3g}",
            soft_wrap=True,
        )
    held = report.room
    console.print(
        f"engine {engine.layout} ({engine.engine_ranks} devices): {held.weights / GIB:.1f} GiB of"
        f" weights, {held.cache / GIB:.1f} GiB of cache on each: {held.tokens:,} tokens",
        soft_wrap=True,
    )
    console.print(_curve(report))
    if report.simulation is not None:
        _print_simulation(report, report.simulation, console)
    console.print(
        f"predictions of this kind were off by {BAND['tpot']:.0%} (TPOT) and {BAND['ttft']:.0%}"
        " (TTFT) on average where published measurements exist",
        style="dim",
        soft_wrap=True,
    )
    if explained:
        for line in report.lines:
            console.print(line, soft_wrap=True)


def _options(report: Report) -> Table:
    assert report.plan is not None
    table = Table(title="ways to serve it, fewest devices first", title_justify="left")
    table.add_column("deployment", min_width=22, overflow="fold")
    for name in ("devices", "TTFT p95", "TPOT p95", "within", "req/s", "$/M"):
        table.add_column(name, justify="right", no_wrap=True)
    for option in report.plan.options:
        dollars = option.dollars(report.cluster)
        table.add_row(
            option.name + ("" if option.fits else " (does not fit)"),
            str(option.devices),
            *_latency(option.summary, "ttft", (95,)),
            *_latency(option.summary, "tpot", (95,)),
            f"{option.share:.1%}",
            f"{option.most:.3g}",
            "-" if dollars is None or not option.fits else f"{dollars:.2f}",
        )
    return table


def _curve(report: Report) -> Table:
    table = Table(title="without queues", title_justify="left")
    for name in ("at once", "step", "TTFT", "TPOT", "tokens/s", "requests/s"):
        table.add_column(name, justify="right")
    for each in report.points:
        table.add_row(
            str(each.batch), f"{each.step * 1e3:.2f} ms", f"{each.ttft * 1e3:.1f} ms",
            f"{each.tpot * 1e3:.2f} ms", f"{each.tokens_per_second:,.0f}",
            f"{each.requests_per_second:.3g}",
        )  # fmt: skip
    return table


def _print_simulation(report: Report, run: Simulation, console: Console) -> None:
    summary = run.summary(report.question.limits)
    table = Table(title=f"simulated: {run.traffic.name}", title_justify="left")
    for name in ("", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for name in ("ttft", "tpot", "itl", "e2e"):
        table.add_row(name.upper(), *_latency(summary, name, (None, 50, 90, 95, 99)))
    console.print(table)
    busy = sum(run.busy) / max(1, len(run.busy))
    good = "" if summary.goodput is None else (
        f"; goodput {summary.goodput:.3g} requests/s ({summary.goodput_share or 0:.1%})"
    )  # fmt: skip
    console.print(
        f"{summary.output_throughput:,.0f} tokens/s on {run.devices} devices, engines busy"
        f" {busy:.0%}, {run.preemptions} preemptions, {run.hit_rate:.0%} of prompts from the"
        f" prefix cache{good}",
        soft_wrap=True,
    )


def _latency(summary: Summary, name: str, wanted: tuple[int | None, ...]) -> list[str]:
    found = summary.latencies[name]
    if found is None:
        return ["-"] * len(wanted)
    values = [found.mean if each is None else found.percentiles[each] for each in wanted]
    return [f"{value:.2f} s" if value >= 10 else f"{value * 1e3:.1f} ms" for value in values]
