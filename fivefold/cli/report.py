"""`fivefold report`: draw a run's records."""

from __future__ import annotations

from pathlib import Path

import typer


def report(
    run_dir: Path = typer.Argument(help="Folder of a run (it holds metrics.jsonl)."),
) -> None:
    """Write RUN_DIR/report.html: loss, throughput, MFU and memory, in one self-contained page."""
    from fivefold.observe.report import write_report

    typer.echo(str(write_report(run_dir)))
