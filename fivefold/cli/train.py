"""`fivefold train`: run, or resume, a training run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from fivefold.core.resolve import Resolved

EXAMPLES = """Examples:

    fivefold train quickstart

    fivefold train quickstart --nproc 2 --layout dp_shard=2 --run-dir runs/two

    fivefold train my.yaml --set optimizer.lr=1e-3 --set train.steps=200

    torchrun --nproc-per-node 8 -m fivefold train my.yaml --layout dp_replicate=2,dp_shard=4

    fivefold train llama3.1-405b --layout tp=8,pp=16,dp_shard=128 --dry-run
"""


def train(
    source: str = typer.Argument(
        help="A recipe's name or a YAML file.", metavar="CONFIG_OR_RECIPE"
    ),
    layout: str | None = typer.Option(None, help="AXIS=N,… e.g. dp_shard=2,zero=2."),
    sets: list[str] = typer.Option([], "--set", help="KEY=VALUE override; may be repeated."),
    run_dir: Path | None = typer.Option(None, help="Records and checkpoints; default runs/NAME."),
    nproc: int = typer.Option(1, min=1, help="Processes to start on this machine."),
    dry_run: bool = typer.Option(
        False, help="Count bytes held and moved in a step of the layout, in this process alone."
    ),
    dry_run_rank: str = typer.Option(
        "0", help="The rank to look at, or `stages`: one of each pipeline stage.", metavar="R"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the dry run as JSON."),
) -> None:
    """Train. The same command on the same run directory resumes where it stopped."""
    from fivefold.core.environment import read_ranks, under_torchrun
    from fivefold.core.errors import ConfigError
    from fivefold.core.resolve import resolve

    resolved = resolve(source, layout=layout, sets=sets)
    if dry_run:
        _dry_run(resolved, dry_run_rank, as_json)
        return
    if as_json or dry_run_rank != "0":
        raise ConfigError("--json and --dry-run-rank say how a dry run is shown", "add --dry-run")
    folder = run_dir or Path("runs") / resolved.name
    if under_torchrun() and nproc > 1:
        raise ConfigError("--nproc starts torchrun, but torchrun started this", "leave --nproc out")
    if nproc > 1:
        from fivefold.engines.train.launch import launch

        launch(nproc, resolved.config, _without_nproc(sys.argv[1:]))
        return
    resolved.config.layout.check_world(read_ranks().world_size)

    from fivefold.engines.train.run import run

    run(resolved.config, folder)


train.__doc__ = f"{train.__doc__}\n\n{EXAMPLES}"


def _dry_run(resolved: Resolved, ranks: str, as_json: bool) -> None:
    import json

    from rich.console import Console

    from fivefold.core.errors import ConfigError
    from fivefold.engines.train.dry_run.report import show
    from fivefold.engines.train.dry_run.run import dry_run, one_of_each_stage

    layout = resolved.config.layout
    if ranks != "stages" and not ranks.isdigit():
        raise ConfigError(f"--dry-run-rank {ranks!r} is no rank", "give a number, or `stages`")
    chosen = one_of_each_stage(layout) if ranks == "stages" else [int(ranks)]
    accounts = dry_run(resolved.config, chosen)
    if as_json:
        found = {"layout": str(layout), "world_size": layout.world_size}
        typer.echo(json.dumps({**found, "ranks": [a.as_dict() for a in accounts]}))
        return
    title = f"{resolved.name} on {layout.world_size:,} ranks ({layout}): one step of a rank"
    show(title, accounts, Console(highlight=False))


def _without_nproc(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--nproc":
            skip = True
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return kept
