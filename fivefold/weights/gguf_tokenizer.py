"""The tokenizer of a GGUF file, from its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import TokenizerError, nearest, one_line
from fivefold.text.byte_level import byte_level_bpe
from fivefold.text.sentencepiece_bpe import PieceKind, sentencepiece_bpe
from fivefold.text.special import add_special_tokens, surround
from fivefold.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_MODELS = ("gpt2", "llama")
# Byte-level vocabularies whose texts begin with bos when the file does not say, as in llama.cpp.
_BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """True where a file brings a vocabulary."""
    return f"{_PREFIX}tokens" in metadata


def tokenizer_from_gguf(path: object, metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level (`gpt2`) or SentencePiece (`llama`) BPE with its special tokens and template.

    Raises TokenizerError for other kinds, and for metadata that is missing.
    """
    try:
        return _Builder(metadata).build()
    except TokenizerError as error:
        raise TokenizerError(f"{path} {error.message}", error.mend) from None
    except Exception as error:  # the Rust library raises plain Exception
        raise TokenizerError(
            f"{path} has a broken vocabulary: {one_line(error)}", "convert the model again"
        ) from None


class _Builder:
    """Metadata below `tokenizer.ggml.`. Its errors say what the file does; the caller, which."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._tokens: list[str] = self._need("tokens")
        count = len(self._tokens)
        self._kinds = self._column("token_type", [PieceKind.NORMAL] * count)
        self._scores = self._column("scores", [-float(i) for i in range(count)])

    def build(self) -> Tokenizer:
        """Build the pipeline, then what stands around it."""
        model = self._need("model")
        if model not in _MODELS:
            raise TokenizerError(
                f"has a tokenizer of kind {model!r}, which is not covered",
                nearest(str(model), _MODELS),
            )
        pipeline = self._byte_level() if model == "gpt2" else self._sentencepiece()
        roles = {role: self._token(name) for name, role in _ROLES.items()}
        special = {role: token for role, token in roles.items() if token is not None}
        also = {self._id(name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
        add_special_tokens(pipeline, self._tokens, self._kinds, also - {None})  # type: ignore[arg-type]
        bos = model == "llama" or self._metadata.get(f"{_PREFIX}pre") in _BOS_BY_DEFAULT
        surround(
            pipeline,
            special.get("bos_token") if self._get("add_bos_token", bos) else None,
            special.get("eos_token") if self._get("add_eos_token", False) else None,
        )
        ends = [self._id(name) for name in ("eot", "eom")]
        return Tokenizer(
            pipeline,
            special_tokens=special,
            stop_ids=[i for i in ends if i is not None],
            chat_template=self._metadata.get("tokenizer.chat_template"),
        )

    def _byte_level(self) -> Any:
        split = self._need("pre")
        merges = [tuple(merge.split(" ", 1)) for merge in self._need("merges")]
        return byte_level_bpe(self._tokens, merges, split)

    def _sentencepiece(self) -> Any:
        return sentencepiece_bpe(
            self._tokens,
            self._scores,
            self._kinds,
            add_space_prefix=self._get("add_space_prefix", True),
        )

    def _need(self, key: str) -> Any:
        value = self._get(key, None)
        if value is None:
            raise TokenizerError(
                f"lacks the metadata {_PREFIX}{key}",
                "convert the model again with a current llama.cpp",
            )
        return value

    def _get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"{_PREFIX}{key}", default)

    def _column(self, key: str, default: list[Any]) -> list[Any]:
        values = self._get(key, default)
        if len(values) != len(self._tokens):
            raise TokenizerError(
                f"has {len(values)} {_PREFIX}{key} for {len(self._tokens)} tokens",
                "convert the model again",
            )
        return values

    def _id(self, name: str) -> int | None:
        token_id = self._get(f"{name}_token_id", None)
        # llama.cpp marks a role that nothing has by an id outside the vocabulary.
        return token_id if token_id is not None and token_id < len(self._tokens) else None

    def _token(self, name: str) -> str | None:
        token_id = self._id(name)
        return None if token_id is None else self._tokens[token_id]
