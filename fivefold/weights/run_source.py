"""A checkpoint of our own, or the run that holds it, as a source of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fivefold.model.families import parse_config
from fivefold.text import tokenizer_folder
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights import checkpoint_source
from fivefold.weights.checkpoint_manifest import MODEL_FOLDER
from fivefold.weights.checkpoint_place import resolve_checkpoint
from fivefold.weights.source import Entry, Kind, ModelSource


class CheckpointSource(ModelSource):
    """Tensors are verified against the manifest's hashes as they are read."""

    kind: Kind = "checkpoint"
    has_weights = True

    def __init__(self, path: Path) -> None:
        # One checkpoint for the life of the source, whatever the run writes meanwhile.
        folder = resolve_checkpoint(path)
        super().__init__(folder, parse_config(checkpoint_source.read_config(folder)))

    @property
    def has_tokenizer(self) -> bool:
        """True where a tokenizer was saved along."""
        return tokenizer_folder.has_tokenizer(self.path / MODEL_FOLDER)

    def entries(self) -> Mapping[str, Entry]:
        """Tensors by our names, which are the checkpoint's."""
        return self._entries

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        shapes = checkpoint_source.tensor_shapes(self.path)
        return {name: Entry(name, self.path, tuple(shape)) for name, shape in shapes.items()}

    def get(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """One tensor. Verifies every file with a piece of it: for all of them use `tensors`."""
        ((_, tensor),) = checkpoint_source.read_tensors(self.path, [name])
        return tensor.to(device=device, dtype=dtype)

    def tensors(
        self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time; each file is verified once."""
        for name, tensor in checkpoint_source.read_tensors(self.path):
            yield name, tensor.to(device=device, dtype=dtype)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer saved along. Raises TokenizerError."""
        return Tokenizer.from_folder(checkpoint_source.tokenizer_folder(self.path))
