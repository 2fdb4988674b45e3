"""`fivefold convert`: a checkpoint, GGUF or llama2.c model to a Hugging Face folder, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer


def convert(
    model: str = typer.Argument(help="Run, checkpoint, Hugging Face folder, GGUF, or `smollm2`."),
    output: Path = typer.Argument(help="Folder to write; must not exist or be empty."),
    to: Literal["huggingface", "checkpoint"] = typer.Option("huggingface", help="What to write."),
    dtype: Literal["fp32", "bf16", "fp16"] = typer.Option("fp32", help="Format of the weights."),
) -> None:
    """Convert a model between our checkpoints and Hugging Face folders.

    Examples:

        fivefold convert runs/quickstart exported

        fivefold convert exported back --to checkpoint

        fivefold convert smollm2 smollm2-bf16 --dtype bf16
    """
    from fivefold.engines.train.convert import to_checkpoint, to_huggingface

    if to == "huggingface":
        to_huggingface(model, output, dtype)
    else:
        to_checkpoint(model, output)
    typer.echo(str(output))
