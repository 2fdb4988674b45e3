"""`fivefold plan compare`: what was planned beside what a run measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from fivefold.plan.calibrate.compare import Line

EPILOG = (
    "Examples:\n\n"
    "    fivefold plan compare runs/quickstart\n\n"
    "    fivefold plan compare runs/big --cluster 8x8xH100 --json\n\n"
    "    fivefold plan --model smollm2 --cluster runs/quickstart/hardware.json\n\n"
)


def plan_compare(
    run_dir: Path = typer.Argument(help="The folder of a run of `fivefold train`."),
    cluster: str | None = typer.Option(
        None, help="Where it ran. [default: the run's GPUs by name, or `this`]", show_default=False
    ),
    out: Path | None = typer.Option(
        None,
        help="Where the recalibrated hardware goes. [default: RUN_DIR/hardware.json or .yaml]",
        show_default=False,
    ),
    keep: bool = typer.Option(False, help="Make it this machine's profile (cluster `this`), too."),
    as_json: bool = typer.Option(False, "--json", help="Print all lines as JSON."),
) -> None:
    """Predicted against measured, line by line; writes the machine as the run knows it."""
    from rich.console import Console

    from fivefold.core.errors import PlanError
    from fivefold.plan.calibrate.compare import cluster_of_run, compare
    from fivefold.plan.calibrate.finished import read_finished
    from fivefold.plan.calibrate.recalibrate import file_for, recalibrated, slowdown
    from fivefold.plan.hardware.parse import cluster as find

    run = read_finished(run_dir)
    where = cluster_of_run(run) if cluster is None else find(cluster)
    _, lines = compare(run, where)
    path = file_for(run, where, run_dir) if out is None else out
    factor: float | None = None
    try:
        factor = slowdown(run, where)
        learnt = f"{recalibrated(run, where, factor, path)}; written to {path}: plan with --cluster {path}"
    except PlanError as error:  # the comparison stands; it says what to look at
        learnt = f"nothing is written: {error}"
    if keep and factor is not None:
        _keep(path)
    if as_json:
        told = [asdict(line) | {"error": line.error} for line in lines]
        written = None if factor is None else str(path)
        typer.echo(
            json.dumps({"run": run.name, "on": where.name, "lines": told, "slowdown": factor,
                        "written": written, "learnt": learnt})
        )  # fmt: skip
        return
    console = Console(highlight=False)
    console.print(
        f"{run.name}: {run.shape.name}, {run.strategy.layout}, on {where.name}", soft_wrap=True
    )
    console.print(_table(lines))
    console.print(learnt, soft_wrap=True)


def _keep(path: Path) -> None:
    from fivefold.core.errors import PlanError
    from fivefold.plan.hardware.profile import own_profile, read_profile, write_profile

    if path.suffix != ".json":
        raise PlanError(
            f"{path} is no measured profile, so that it cannot be kept as this machine's",
            "measure this machine first, with `fivefold bench device`",
        )
    profile = read_profile(path)
    write_profile(profile, own_profile(profile.device_type))


def _table(lines: list[Line]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("what", no_wrap=True)
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for line in lines:
        measured = "" if line.measured is None else _text(line.unit, line.measured)
        error = "" if line.error is None else f"{line.error:+.1%}"
        table.add_row(line.what, _text(line.unit, line.predicted), measured, error, line.note)
    return table


def _text(unit: str, value: float) -> str:
    from fivefold.observe import format as as_text

    if unit == "B":
        return as_text.size(value)
    if unit == "1":
        return f"{value:.1%}"
    if unit == "/s":
        return f"{value:,.0f}"
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
