"""`fivefold plan`: look at a layout before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fivefold.cli.plan_compare import plan_compare
from fivefold.cli.plan_hardware import plan_hardware, plan_models
from fivefold.cli.plan_memory import EPILOG as MEMORY_EPILOG
from fivefold.cli.plan_memory import plan_memory
from fivefold.cli.plan_serve import plan_serve
from fivefold.core.errors import DataError, FivefoldError, LayoutError, one_line

if TYPE_CHECKING:
    from fivefold.axes.pp.timeline import Timeline

MOST_ACTIONS, MOST_DRAWN = 1_000_000, 20_000

plan_app = typer.Typer(
    name="plan",
    help="Which layout, will it fit, how fast, at what cost: before anything runs.",
    epilog="Examples:\n\n"
    "    fivefold plan --model llama-3.1-70b --cluster 8x8xH100 "
    "--workload seq=4096,batch=512,tokens=1T\n\n"
    "    fivefold plan --model 13B --cluster 4x8xA100-80GB --workload seq=2048,batch=512 "
    "--layout tp=4,pp=2,dp=4,micro_batch=4 --explain\n\n"
    "    fivefold plan --model config.json --cluster cluster.yaml --workload seq=4096,batch=512 "
    "--html plan.html --recipe plan.yaml --flags megatron\n\n"
    "    fivefold plan memory --help",
    invoke_without_command=True,
)
plan_app.command("memory", epilog=MEMORY_EPILOG)(plan_memory)
plan_app.command("serve")(plan_serve)
plan_app.command("compare")(plan_compare)
plan_app.command("hardware")(plan_hardware)
plan_app.command("models")(plan_models)


@plan_app.callback()
def plan(
    context: typer.Context,
    model: str | None = typer.Option(
        None, help="config.json, a folder with one, a published name (`plan models`), or 13B."
    ),
    cluster: str | None = typer.Option(
        None, help="nodes x devices x name (8x8xH100), 64xH100, 2xNVL72, a YAML file, or `this`."
    ),
    workload: str | None = typer.Option(
        None, help="seq=4096,batch=512,tokens=1T,precision=bf16,optimizer=adamw."
    ),
    layout: str | None = typer.Option(
        None, help="Your own idea, judged beside the best: tp=8,pp=4,dp=2,micro_batch=1,recompute=…"
    ),
    objective: str = typer.Option("time", help="time, cost or memory."),
    software: str = typer.Option(
        "fivefold", help="The training system: fivefold, megatron-core, megatron-2021, …"
    ),
    flags: str | None = typer.Option(
        None, help="Print the best as flags of megatron or torchtitan."
    ),
    recipe: Path | None = typer.Option(None, help="Write the best as a recipe for `train` here."),
    html: Path | None = typer.Option(None, help="Write a page with plots here."),
    explain: bool = typer.Option(False, "--explain", help="Show the arithmetic."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Search all layouts of a training run, and say which is best and why."""
    if context.invoked_subcommand is not None:
        return
    if model is None and cluster is None and workload is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    from fivefold.cli.plan_training import plan_training

    plan_training(
        model=model, cluster=cluster, workload=workload, layout=layout, objective=objective,
        software=software, flags=flags, recipe=recipe, html=html, explain=explain, as_json=as_json,
    )  # fmt: skip


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
        _check_length(pp, microbatches, virtual)
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
    if len(timeline.spans) > MOST_DRAWN:
        console.print("(too long to draw here; --svg draws it, --json has its times)")
    else:
        console.print(draw(timeline, console.width), soft_wrap=True, end="")
        console.print(legend(timeline), soft_wrap=True)
    for line in _summary(timeline):
        console.print(line, soft_wrap=True)


def _check_length(pp: int, microbatches: int, virtual: int | None) -> None:
    """Raise LayoutError for schedules that would be simulated for minutes."""
    passes = 2 * pp * microbatches * (virtual or 1)
    if passes > MOST_ACTIONS:
        raise LayoutError(
            f"{pp} ranks and {microbatches} micro-batches make {passes:,} passes, too many to simulate",
            f"use at most {MOST_ACTIONS:,}: fewer micro-batches have the same pattern",
        )


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
