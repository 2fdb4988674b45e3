"""The format of llama2.c (Karpathy 2023), version 0: fp32 tensors in a fixed order.

int32 x 7     dim, hidden_dim, layers, heads, kv_heads, vocab_size, max_seq_len
fp32          embedding; per kind, all layers: attention norm, query, key, value, output,
              feed-forward norm, gate, down, up; final norm; two rotary tables, unused;
              the head, when vocab_size is negative
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fivefold.core.errors import WeightsError
from fivefold.model.families import parse_config
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.gguf_names import halves_from_pairs
from fivefold.weights.llama2c_tokenizer import find_tokenizer, read_tokenizer
from fivefold.weights.mapped_file import MappedFile
from fivefold.weights.source import Entry, Kind, ModelSource

_HEADER = struct.Struct("<7i")
_LATER_VERSIONS = 0x616B3432  # "ak42"
_MAX_DIM = 1 << 20
_BOS, _EOS = 1, 2


def looks_like_llama2c(path: Path) -> bool:
    """True for a plausible header; whether the size agrees is said when it is opened."""
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
    if len(start) < _HEADER.size:
        return False
    dim, hidden, layers, heads, kv_heads, vocab, length = _HEADER.unpack(start)
    if dim == _LATER_VERSIONS:
        return True
    sizes = (dim, hidden, layers, heads, kv_heads, abs(vocab), length)
    return all(0 < size <= _MAX_DIM for size in sizes) and not (dim % heads or heads % kv_heads)


class Llama2cSource(ModelSource):
    """A `.bin` of llama2.c, its tokenizer (`tok*.bin`) beside it."""

    kind: Kind = "llama2c"
    has_weights = True

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        dim, hidden, layers, heads, kv_heads, vocab, length = _HEADER.unpack_from(self._file.bytes)
        if dim == _LATER_VERSIONS:
            raise WeightsError(
                f"{path} is in version {hidden} of the llama2.c format, version 0 is read",
                "export it with llama2.c's export.py --version 0",
            )
        config = {
            "model_type": "llama",
            "hidden_size": dim,
            "intermediate_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": abs(vocab),
            "max_position_embeddings": length,
            "rms_norm_eps": 1e-5,  # run.c's constant
            "tie_word_embeddings": vocab > 0,
            "bos_token_id": _BOS,
            "eos_token_id": _EOS,
        }
        super().__init__(path, parse_config(config))
        self._check_size()

    @property
    def has_tokenizer(self) -> bool:
        """True where a tokenizer lies beside the file."""
        return find_tokenizer(self.path, self.config.vocab_size) is not None

    def entries(self) -> Mapping[str, Entry]:
        """Tensors by our names, in the order of the file."""
        return {name: Entry(name, self.path, shape) for name, (_, shape) in self._places.items()}

    def get(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """One tensor, rotary pairs in Hugging Face's order."""
        offset, shape = self._places[name]
        value = self._file.tensor(offset, shape, torch.float32)
        if ".query." in name:
            value = halves_from_pairs(value, self.config.num_heads)
        if ".key." in name:
            value = halves_from_pairs(value, self.config.num_kv_heads)
        return value.to(device=device, dtype=dtype)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the file. Raises TokenizerError."""
        return read_tokenizer(self.path, self.config.vocab_size)

    @cached_property
    def _places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        places, offset = {}, _HEADER.size
        for name, shape in self._layout():
            if name is not None:
                places[name] = (offset, shape)
            offset += 4 * math.prod(shape)
        return places

    def _layout(self) -> Iterator[tuple[str | None, tuple[int, ...]]]:
        """Every tensor in the order of the file; None for what is not used."""
        config = self.config
        D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size  # noqa: N806
        H, K = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim  # noqa: N806
        yield "embedding.weight", (V, D)
        kinds: dict[str, tuple[int, ...]] = {
            "attention_norm": (D,),
            "attention.query": (H, D),
            "attention.key": (K, D),
            "attention.value": (K, D),
            "attention.output": (D, H),
            "feed_forward_norm": (D,),
            "feed_forward.gate": (F, D),
            "feed_forward.down": (D, F),
            "feed_forward.up": (F, D),
        }
        for kind, shape in kinds.items():
            for layer in range(config.num_layers):
                yield f"layers.{layer}.{kind}.weight", shape
        yield "norm.weight", (D,)
        yield None, (2, config.max_positions, config.head_dim // 2)
        if not config.tie_embeddings:
            yield "head.weight", (V, D)

    def _check_size(self) -> None:
        end = _HEADER.size
        for name, shape in self._layout():
            end += 4 * math.prod(shape)
            if end > self._file.size:
                raise WeightsError(
                    f"{self.path} is truncated: {name or 'its rotary table'} ends at byte {end}, "
                    f"but the file has {self._file.size}",
                    "copy it again from the model's origin",
                )
        if end < self._file.size:
            raise WeightsError(
                f"{self.path} has {self._file.size} bytes, its header describes {end}",
                "check that it is a llama2.c file of version 0",
            )
