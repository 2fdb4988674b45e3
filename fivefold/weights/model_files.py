"""The `model/` part of a checkpoint: config.json and tokenizer, so that it opens as a model."""

from __future__ import annotations

import json
from pathlib import Path

from fivefold.model.config import ModelConfig
from fivefold.model.families import export_config
from fivefold.text.tokenizer import Tokenizer


def write_model_files(folder: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Write Hugging Face spelled config.json, and the tokenizer's files, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(export_config(config), indent=2), "utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
