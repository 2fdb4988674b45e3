"""`fivefold train`: run, or resume, a training run."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

EXAMPLES = """Examples:

    fivefold train quickstart

    fivefold train quickstart --nproc 2 --layout dp_shard=2 --run-dir runs/two

    fivefold train my.yaml --set optimizer.lr=1e-3 --set train.steps=200

    torchrun --nproc-per-node 8 -m fivefold train my.yaml --layout dp_replicate=2,dp_shard=4
"""


def train(
    source: str = typer.Argument(
        help="A recipe's name or a YAML file.", metavar="CONFIG_OR_RECIPE"
    ),
    layout: str | None = typer.Option(None, help="AXIS=N,… e.g. dp_shard=2,zero=2."),
    sets: list[str] = typer.Option([], "--set", help="KEY=VALUE override; may be repeated."),
    run_dir: Path | None = typer.Option(None, help="Records and checkpoints; default runs/NAME."),
    nproc: int = typer.Option(1, min=1, help="Processes to start on this machine."),
) -> None:
    """Train. The same command on the same run directory resumes where it stopped."""
    from fivefold.core.environment import read_ranks, under_torchrun
    from fivefold.core.errors import ConfigError
    from fivefold.core.resolve import resolve

    resolved = resolve(source, layout=layout, sets=sets)
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
