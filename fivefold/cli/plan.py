"""`fivefold plan`: look at a layout before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fivefold.core.errors import DataError, FivefoldError, one_line

if TYPE_CHECKING:
    from fivefold.axes.pp.timeline import Timeline

plan_app = typer.Typer(
    name="plan", help="Look at a layout before anything runs.", no_args_is_help=True
)


@plan_app.callback()
def _plan() -> None:
    """Look at a layout before anything runs."""


@plan_app.command(
    "schedule",
    epilog="Examples:\n\n"
    "    fivefold plan schedule --schedule interleaved --pp 4 --microbatches 8\n\n"
    "    fivefold plan schedule --schedule zb-h1 --pp 8 --microbatches 16 --svg zb-h1.svg\n\n"
    "    fivefold plan schedule --schedule 1f1b --pp 4 --microbatches 8 --send 0.5 --json\n\n"
    "    fivefold plan schedule --measured timeline.json --svg timeline.svg",
)
def schedule(
    name: str = typer.Option(
        "1f1b",
        "--schedule",
        help="gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipe or dualpipe-v.",
    ),
    pp: int = typer.Option(4, "--pp", help="Pipeline ranks."),
    microbatches: int = typer.Option(8, help="Micro-batches of a step (and data-parallel rank)."),
    virtual: int | None = typer.Option(
        None, help="Stages a rank, for the interleaved schedule. [default: 2]", show_default=False
    ),
    forward: float = typer.Option(1.0, help="Time of a stage's forward for one micro-batch."),
    input: float = typer.Option(1.0, help="Time of its backward for the input."),
    weight: float = typer.Option(1.0, help="Time of its backward for the weights."),
    send: float = typer.Option(0.0, help="Time of a message from rank to rank."),
    measured: Path | None = typer.Option(
        None, help="Draw the times in this JSON file, of a real run, instead of simulating."
    ),
    svg: Path | None = typer.Option(None, help="Write the picture to this file, too."),
    as_json: bool = typer.Option(False, "--json", help="Print numbers and actions as JSON."),
) -> None:
    """Simulate a pipeline schedule and draw it: the action lists that training executes."""
    from rich.console import Console

    from fivefold.axes.pp.build import build_schedule
    from fivefold.axes.pp.draw import draw, legend
    from fivefold.axes.pp.record import from_numbers, to_numbers
    from fivefold.axes.pp.simulate import Costs, simulate
    from fivefold.axes.pp.svg import svg as picture

    if measured is None:
        costs = Costs.checked(forward, input, weight, send)
        timeline = simulate(build_schedule(name, pp, microbatches, virtual), costs)
    else:
        timeline = from_numbers(_read(measured))
    if svg is not None:
        _write(svg, picture(timeline, _title(timeline)))
    if as_json:
        typer.echo(json.dumps(to_numbers(timeline)))
        return
    console = Console(highlight=False)
    console.print(_title(timeline), soft_wrap=True)
    console.print(draw(timeline, console.width), soft_wrap=True, end="")
    console.print(legend(timeline), soft_wrap=True)
    for line in _summary(timeline):
        console.print(line, soft_wrap=True)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {one_line(error)}", "give the JSON file of a timeline"
        ) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FivefoldError(
            f"cannot write {path}: {error.strerror}", "choose a file in a folder that exists"
        ) from error


def _title(timeline: Timeline) -> str:
    s = timeline.schedule
    copies = " in each of 2 directions" if s.directions == 2 else ""
    return (
        f"{s.name}: {s.ranks} ranks, {s.stages} stages{copies}, {s.microbatches} micro-batches; "
        f"bubble {timeline.bubble_share:.1%}"
    )


def _summary(timeline: Timeline) -> list[str]:
    ranks = range(timeline.schedule.ranks)
    kept = [timeline.peak_in_flight(rank) for rank in ranks]
    inside = max(timeline.idle_inside(rank) for rank in ranks)
    return [
        f"time {timeline.makespan:g}, bubble {timeline.bubble_share:.1%} of all ranks' time; "
        f"inside a rank's own first and last action at most {inside:g} idle",
        f"activations kept at most, by rank: {' '.join(map(str, kept))} of one stage; as "
        f"micro-batches of a 1/{timeline.schedule.ranks} of the model: "
        + " ".join(f"{timeline.peak_share(rank):g}" for rank in ranks),
    ]
