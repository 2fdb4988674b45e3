"""Text to token ids and back, over the Rust `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from fivefold.text import tokenizer_folder
from fivefold.text.chat import CHATML, ChatTemplate
from fivefold.text.spelling import Spelling, spelling_of
from fivefold.text.train import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS, train_byte_level_bpe


class Tokenizer:
    """A `tokenizers` pipeline, the roles of its special tokens, and its chat template.

    `special_tokens` maps bos_token, eos_token, unk_token, pad_token to their text. `stop_ids` are
    ids that end an answer, beside eos_token. `settings` are further keys of
    tokenizer_config.json, carried along so that they are written back.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        stop_ids: Sequence[int] = (),
        chat_template: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        # A stored padding or truncation would change what `encode` returns.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.settings = dict(settings or {})
        self.bos_id = self._id_of("bos_token")
        self.pad_id = self._id_of("pad_token")
        eos = self._id_of("eos_token")
        self.eos_ids = tuple(dict.fromkeys(([] if eos is None else [eos]) + list(stop_ids)))
        self.chat = (
            None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id: the rows that an embedding needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: what `decode` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def spelling(self) -> Spelling | None:
        """Bytes of each token; None for pipelines that do not write texts token by token."""
        return spelling_of(self.backend)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids. `add_special`: with what the model expects around a text (often bos)."""
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def encode_batch(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        """Token ids of each text, in parallel."""
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special)
        return [item.ids for item in encoded]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides how text and chats become ids."""
        chat = self.chat.source if self.chat else None
        parts = [self.backend.to_str(), self.special_tokens, list(self.eos_ids), chat]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the ids' generation_config.json."""
        tokenizer_folder.write(
            Path(folder),
            tokenizer_folder.Parts(
                self.backend,
                self.special_tokens,
                self.eos_ids,
                self.chat.source if self.chat else None,
                self.settings,
            ),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read a Hugging Face folder. Raises TokenizerError naming the file that is wrong."""
        parts = tokenizer_folder.read(Path(folder))
        return cls(
            parts.backend,
            special_tokens=parts.special_tokens,
            stop_ids=parts.stop_ids,
            chat_template=parts.chat_template,
            settings=parts.settings,
        )

    @classmethod
    def train_bpe(cls, texts: Iterator[str], vocab_size: int) -> Tokenizer:
        """Byte-level BPE learned from `texts`; the same texts give the same tokenizer.

        Documents end with `<|endoftext|>`, and its chat template is ChatML. Raises TokenizerError
        when `vocab_size` has no room for the 256 bytes and the special tokens.
        """
        backend = train_byte_level_bpe(texts, vocab_size)
        return cls(
            backend,
            special_tokens={"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT},
            stop_ids=[SPECIAL_TOKENS.index(END_OF_TURN)],
            chat_template=CHATML,
        )

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)
