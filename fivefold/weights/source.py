"""What every source of a model has: a configuration, tensors by our names, and a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fivefold.model.config import ModelConfig
from fivefold.text.tokenizer import Tokenizer

Kind = Literal["huggingface", "gguf", "llama2c", "checkpoint", "smollm2"]


@dataclass(frozen=True)
class Entry:
    """One stored tensor: the name and file that hold it, for messages, and its shape."""

    name: str
    file: Path
    shape: tuple[int, ...]


class ModelSource(ABC):
    """A model on disk. Making one reads its configuration; tensors are read when asked for."""

    kind: Kind

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path = path
        self.config = config

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """False for a configuration alone."""

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool:
        """True where `tokenizer` has something to read."""

    @abstractmethod
    def entries(self) -> Mapping[str, Entry]:
        """The stored tensors of the decoder, by our parameter names, in the order of the file."""

    def strangers(self) -> list[str]:
        """Names of stored tensors that are no part of such a decoder."""
        return []

    @abstractmethod
    def get(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """One tensor in `dtype` (None: as stored; dequantized values are fp32).

        On the CPU and in the stored dtype it may be a private mapping of the file.
        """

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError when there is none."""

    def tensors(
        self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time."""
        for name in self.entries():
            yield name, self.get(name, dtype, device)
