"""A GGUF file (llama.cpp's format): configuration, weights and tokenizer in one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fivefold.core.errors import TokenizerError
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.gguf_config import config_from_gguf
from fivefold.weights.gguf_dequantize import read_stored
from fivefold.weights.gguf_header import read_header
from fivefold.weights.gguf_names import PASSED_OVER, gguf_names, in_our_order, is_offset
from fivefold.weights.gguf_tokenizer import has_tokenizer, tokenizer_from_gguf
from fivefold.weights.mapped_file import MappedFile
from fivefold.weights.source import Entry, Kind, ModelSource

_ROPE_TABLE = "rope_freqs.weight"


class GGUFSource(ModelSource):
    """Tensors are dequantized one at a time from the mapped file."""

    kind: Kind = "gguf"
    has_weights = True

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        self._header = read_header(self._file)
        table = self._header.tensors.get(_ROPE_TABLE)
        rope_table = None if table is None else read_stored(self._file, table, torch.float32)
        super().__init__(path, config_from_gguf(path, self._header, rope_table))

    @property
    def has_tokenizer(self) -> bool:
        """True where the metadata brings a vocabulary."""
        return has_tokenizer(self._header.metadata)

    def entries(self) -> Mapping[str, Entry]:
        """Tensors by our names, in the order of the file."""
        return self._found

    def strangers(self) -> list[str]:
        """Tensors that are no part of the decoder."""
        known = {entry.name for entry in self._found.values()} | PASSED_OVER
        return [name for name in self._header.tensors if name not in known]

    def get(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """One tensor, dequantized, in the order and offset of Hugging Face's weights."""
        stored = self._header.tensors[self._found[name].name]
        if is_offset(name, self.config):
            # Rounded once, after the offset is gone: near 1 a small weight would lose its bits.
            value = read_stored(self._file, stored, torch.float32) - self.config.norm_offset
        else:
            value = in_our_order(name, read_stored(self._file, stored, dtype), self.config)
        return value.to(device=device, dtype=dtype)

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer. Raises TokenizerError when it has none or one not covered."""
        if not self.has_tokenizer:
            raise TokenizerError(
                f"{self.path} has no tokenizer (looked for tokenizer.ggml.tokens)",
                "convert the model again with its vocabulary",
            )
        return tokenizer_from_gguf(self.path, self._header.metadata)

    @cached_property
    def _found(self) -> dict[str, Entry]:
        ours = {theirs: name for name, theirs in gguf_names(self.config).items()}
        return {
            ours[name]: Entry(name, self.path, stored.shape)
            for name, stored in self._header.tensors.items()
            if name in ours
        }
