"""Opening a model by name or path: what it is, is told from what lies there."""

from __future__ import annotations

from pathlib import Path

import torch

from fivefold.core.errors import WeightsError, nearest
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.checkpoint_place import is_checkpoint
from fivefold.weights.gguf_header import MAGIC as GGUF_MAGIC
from fivefold.weights.gguf_source import GGUFSource
from fivefold.weights.huggingface import ConfigSource, HuggingFaceSource
from fivefold.weights.llama2c import Llama2cSource, looks_like_llama2c
from fivefold.weights.load import decoder_from
from fivefold.weights.smollm2 import open_smollm2
from fivefold.weights.source import ModelSource

NAMES = {"smollm2": open_smollm2}

_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def open_source(name_or_path: str | Path) -> ModelSource:
    """The model that a name or path means: its configuration, weights and tokenizer.

    `smollm2`; a Hugging Face folder or config.json; a GGUF file; a llama2.c file; a checkpoint, or
    a run folder (its latest). Reads the configuration alone. Raises WeightsError (CheckpointError
    for checkpoints) saying what is wrong with the place and what to give instead.
    """
    if str(name_or_path) in NAMES:
        return NAMES[str(name_or_path)]()
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise _unknown(path)
    if is_checkpoint(path):
        # Imports what reads checkpoints, DTensor with it: a second that no other model pays.
        from fivefold.weights.run_source import CheckpointSource

        return CheckpointSource(path)
    return HuggingFaceSource(path) if path.is_dir() else _open_file(path)


def load_decoder(
    name_or_path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """The decoder of a model with its weights in `dtype` (see `decoder_from`)."""
    return decoder_from(open_source(name_or_path), dtype, device)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer of a model, or of a folder that holds nothing else. Raises TokenizerError."""
    path = Path(name_or_path).expanduser()
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_folder(path)
    return open_source(name_or_path).tokenizer()


def _open_file(path: Path) -> ModelSource:
    with path.open("rb") as file:
        start = file.read(8)
    if path.suffix == ".json":
        return ConfigSource(path)
    if start[:4] == GGUF_MAGIC or path.suffix == ".gguf":
        return GGUFSource(path)
    if path.suffix == ".safetensors":
        raise WeightsError(
            f"{path} holds weights without a configuration", f"give the folder: {path.parent}"
        )
    if start.startswith(_PICKLE_STARTS) or path.suffix in (".pt", ".pth", ".ckpt"):
        raise WeightsError(
            f"{path} is a pickle, which can run code and is never read",
            "get the safetensors files from the model's origin",
        )
    if looks_like_llama2c(path):
        return Llama2cSource(path)
    raise WeightsError(
        f"{path} is in no format that is read", "give a Hugging Face folder or a GGUF file"
    )


def _unknown(path: Path) -> WeightsError:
    """Nothing is there: the nearest of the names, and of what lies beside it."""
    parent = path.parent
    beside = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    names = list(NAMES) if parent == Path() else []
    if not beside and not names:
        return WeightsError(f"there is no {path}, nor {parent}", "check the path")
    close = nearest(path.name, names + beside)
    if close.startswith("did you mean"):
        return WeightsError(f"there is no model {path}", close)
    known = f"known names: {', '.join(NAMES)}"
    return WeightsError(
        f"there is no model {path}",
        f"give a path on this machine (nothing is downloaded), or one of the {known}",
    )
