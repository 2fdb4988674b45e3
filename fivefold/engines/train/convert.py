"""Between checkpoints of our own and Hugging Face folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from fivefold.core.errors import TokenizerError, WeightsError
from fivefold.engines.train.checkpoint.checkpointer import Checkpointer, TrainState
from fivefold.precision.formats import DTYPES
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.model_files import write_model_files
from fivefold.weights.open import load_decoder, open_source
from fivefold.weights.save import save_huggingface
from fivefold.weights.source import ModelSource


def to_huggingface(model: str, output: Path, dtype: str) -> None:
    """Write any model source as a Hugging Face folder with weights of `dtype`.

    Raises WeightsError when `output` is not empty or the source cannot be read.
    """
    _check_empty(output)
    source = open_source(model)
    decoder = load_decoder(model, dtype=DTYPES[dtype])
    save_huggingface(
        output,
        {name: value.detach() for name, value in decoder.named_parameters()},
        source.config,
        _tokenizer(source),
        DTYPES[dtype],
    )


def to_checkpoint(model: str, output: Path) -> None:
    """Write any model source as a run folder with one checkpoint, at step 0, without moments.

    It opens as a model source; a run started from it (`model: OUTPUT`) begins a new optimizer.
    """
    _check_empty(output)
    source = open_source(model)
    decoder = load_decoder(model, dtype=torch.float32)
    files = partial(write_model_files, config=source.config, tokenizer=_tokenizer(source))
    checkpointer = Checkpointer(
        output / "checkpoints", keep=1, asynchronous=False, model_files=files
    )
    tensors = {f"model/{name}": value.detach() for name, value in decoder.named_parameters()}
    checkpointer.save(TrainState(0, tensors, {}, {}))
    checkpointer.wait()


def _tokenizer(source: ModelSource) -> Tokenizer | None:
    """A model folder need not hold a tokenizer; one that it holds must be readable."""
    try:
        return source.tokenizer()
    except TokenizerError:
        if source.has_tokenizer:
            raise
        return None


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise WeightsError(f"{output} exists and is not empty", "choose a new folder")
