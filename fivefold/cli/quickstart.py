"""`fivefold quickstart`: the README's tour, by running the very commands a user would type."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

QUESTION = "Why is the sky blue? Answer in two sentences."
CODE_PROMPT = "def __init__(self, "
KILL_AFTER_STEP = 50
POLL_SECONDS = 0.2


def quickstart(
    run_dir: Path = typer.Option(Path("runs/quickstart"), help="Folder of the tour's run."),
    nproc: int = typer.Option(2, min=2, help="Ranks that train together."),
) -> None:
    """Generate with a real model; train a small one on several ranks, kill it, resume, use it.

    Takes a few minutes on two CPU cores. Every step prints the command that does it.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    started = time.monotonic()
    folder = _free_folder(run_dir)
    exported = folder / "exported"
    train = [
        "train", "quickstart", "--nproc", str(nproc), "--layout", f"dp_shard={nproc}",
        "--run-dir", str(folder),
    ]  # fmt: skip

    _title(console, "1. A real model answers (SmolLM2-135M-Instruct)")
    _run(console, ["generate", "--model", "smollm2", "--chat", "--prompt", QUESTION,
                   "--max-new-tokens", "64"])  # fmt: skip
    _title(console, f"2. A small Llama learns from this Python's own source, on {nproc} ranks")
    _train_and_kill(console, train, folder)
    _title(console, "3. The same command again: it resumes")
    _run(console, train)
    _title(console, "4. Export to a Hugging Face folder, and generate from it")
    _run(console, ["convert", str(folder), str(exported)])
    _run(console, ["generate", "--model", str(exported), "--prompt", CODE_PROMPT,
                   "--max-new-tokens", "64", "--temperature", "0.7", "--top-p", "0.9", "--seed", "1"])  # fmt: skip

    losses = [row["loss"] for row in _metrics(folder)]
    table = Table(title="Where everything lies", show_header=False)
    table.add_row("loss", f"{losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
    table.add_row("report", str(folder / "report.html"))
    table.add_row("records", str(folder / "metrics.jsonl"))
    table.add_row("checkpoints", str(folder / "checkpoints"))
    table.add_row("Hugging Face folder", str(exported))
    table.add_row("time", f"{time.monotonic() - started:.0f} s")
    console.print(table)
    console.print("Try next:")
    for line in (
        "fivefold generate --chat",
        f"fivefold generate --model {exported} --prompt 'class ' --temperature 0.8",
        "fivefold train quickstart --set data.sources=YOUR_TEXT_FOLDER --run-dir runs/mine",
        "fivefold config show quickstart",
    ):
        console.print(f"  {line}", highlight=False, soft_wrap=True)


def _title(console: Console, text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "fivefold", *arguments]


def _show(console: Console, arguments: list[str]) -> None:
    console.print(
        f"$ fivefold {shlex.join(arguments)}", style="dim", soft_wrap=True, highlight=False
    )


def _run(console: Console, arguments: list[str]) -> None:
    _show(console, arguments)
    status = subprocess.run(_command(arguments), check=False).returncode
    if status:
        raise typer.Exit(status)


def _train_and_kill(console: Console, arguments: list[str], folder: Path) -> None:
    """Start training; once a checkpoint is behind it, kill -9 the launcher and every rank."""
    _show(console, arguments)
    process = subprocess.Popen(_command(arguments), start_new_session=True)
    try:
        while process.poll() is None:
            rows = _metrics(folder)
            if rows and rows[-1]["step"] >= KILL_AFTER_STEP:
                break
            time.sleep(POLL_SECONDS)
        if process.poll():
            raise typer.Exit(process.returncode)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            console.print(f"\n[bold red]kill -9[/] after step {_metrics(folder)[-1]['step']}")


def _metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, … that does not exist."""
    candidate, number = wanted, 1
    while candidate.exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate
