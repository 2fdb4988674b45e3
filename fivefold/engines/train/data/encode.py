"""From documents to token ids, and which of them are to be learnt."""

from __future__ import annotations

# N tokens of a task, C documents of a task
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import DataError, FivefoldError, TokenizerError
from fivefold.engines.train.data.answers import find_answers
from fivefold.engines.train.data.documents import ChatDocument, Document, TextDocument
from fivefold.engines.train.data.tasks import Task
from fivefold.text.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 20  # an Encoding takes about a hundred bytes a token


@dataclass(frozen=True)
class Encoded:
    """The documents of one task: tokens [N], their lengths [C] int64, their hashes [C] uint64,
    the loss mask [N] uint8 where only answers are learnt, and how many records held no text.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    learnt: NDArray[np.uint8] | None
    empty: int

    def save(self, path: Path) -> None:
        """Write to a .npz file."""
        arrays: dict[str, Any] = {} if self.learnt is None else {"learnt": self.learnt}
        with path.open("wb") as file:
            np.savez(
                file, tokens=self.tokens, lengths=self.lengths, hashes=self.hashes,
                empty=np.int64(self.empty), **arrays,
            )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Encoded:
        """The inverse of save. Nothing is unpickled."""
        with np.load(path, allow_pickle=False) as held:
            learnt = held.get("learnt")
            return cls(held["tokens"], held["lengths"], held["hashes"], learnt, int(held["empty"]))


class Encoder:
    """Encodes tasks with one tokenizer. Every document ends with its end-of-text token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.eos_ids:
            raise TokenizerError(
                "the tokenizer has no end-of-text token to end documents with",
                "choose another data.tokenizer, e.g. bpe:4096",
            )
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        added = tokenizer.backend.get_added_tokens_decoder()
        self._specials = {i for i, token in added.items() if token.special} | set(tokenizer.eos_ids)

    def encode(self, task: Task) -> Encoded:
        """All documents of `task`. Raises DataError naming the place of one that cannot be."""
        parts: list[tuple[list[int], list[int] | None]] = []
        hashes: list[int] = []
        empty = 0
        for batch in _batches(task.documents()):
            documents = [document for document in batch if document is not None]
            empty += len(batch) - len(documents)
            hashes += [document_hash(document) for document in documents]
            parts += self._encode_batch(documents, task.form.kind)
        tokens = _flat([ids for ids, _ in parts])
        highest = int(tokens.max(initial=0))
        if highest > np.iinfo(self.dtype).max:
            raise TokenizerError(
                f"the tokenizer made token {highest}, but says it has {self.tokenizer.vocab_size}",
                "its files do not belong together",
            )
        masks = [mask for _, mask in parts if mask is not None]
        return Encoded(
            tokens.astype(self.dtype),
            np.array([len(ids) for ids, _ in parts], np.int64),
            np.array(hashes, np.uint64),
            _flat(masks).astype(np.uint8) if task.form.has_answers else None,
            empty,
        )

    def _encode_batch(
        self, documents: list[Any], kind: str
    ) -> list[tuple[list[int], list[int] | None]]:
        if kind == "chat":
            return self._encode_chats(documents)
        texts = [document.text for document in documents]
        if kind == "text":
            plain = self.tokenizer.backend.encode_batch_fast(texts, add_special_tokens=True)
            return [(self._ended(encoding.ids), None) for encoding in plain]
        encodings = self.tokenizer.backend.encode_batch(texts, add_special_tokens=True)
        return [self._pair(e, d) for e, d in zip(encodings, documents, strict=True)]

    def _pair(self, encoding: Any, document: TextDocument) -> tuple[list[int], list[int]]:
        """Learnt from the first token that reaches into the answer, to the end-of-text token."""
        ids = self._ended(encoding.ids)
        stops = [stop for _, stop in encoding.offsets]
        first = next(
            (i for i, stop in enumerate(stops) if stop > (document.answer or 0)), len(stops)
        )
        first = min(first, len(ids) - 1)  # an empty answer: learn to end
        return ids, [0] * first + [1] * (len(ids) - first)

    def _encode_chats(
        self, documents: list[ChatDocument]
    ) -> list[tuple[list[int], list[int] | None]]:
        template = self.tokenizer.chat
        if template is None:
            raise DataError(
                f"{documents[0].place} is a chat, but the tokenizer has no chat template",
                "choose a model's tokenizer that has one, or give prompt and completion",
            )
        found = []
        for document in documents:
            try:
                found.append(find_answers(template, document.messages))
            except FivefoldError as error:
                raise DataError(f"{document.place}: {error.message}", error.mend) from None
        texts = [text for text, _ in found]
        encodings = self.tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        return [
            self._chat(encoding, text, answers)
            for encoding, (text, answers) in zip(encodings, found, strict=True)
        ]

    def _chat(
        self, encoding: Any, text: str, answers: list[tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        """Learnt: the tokens of every answer, and the special token that ends its turn."""
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        learnt = [0] * len(encoding.ids)
        ended = True
        for start, stop in answers:
            inside = np.flatnonzero((stops > start) & (starts < stop))
            if not len(inside):
                continue
            after = int(inside[-1]) + 1
            end = after
            while end < len(learnt) and not text[starts[end] : stops[end]].strip():
                end += 1
            ended = end < len(learnt) and encoding.ids[end] in self._specials
            if ended:
                after = end + 1
            learnt[int(inside[0]) : after] = [1] * (after - int(inside[0]))
        ids = self._ended(encoding.ids)
        # A template without an end of turn: then the end of text says that the answer is over.
        learnt += [0 if ended else 1] * (len(ids) - len(learnt))
        return ids, learnt

    def _ended(self, ids: list[int]) -> list[int]:
        if ids and ids[-1] in self.tokenizer.eos_ids:
            return ids
        return [*ids, self.tokenizer.eos_ids[0]]


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type of a token id on disk."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def document_hash(document: Document) -> int:
    """64 bits that are the document's own: equal text, equal hash, whatever the tokenizer."""
    return int.from_bytes(hashlib.blake2b(document.identity(), digest_size=8).digest(), "little")


def _batches(documents: Iterable[Document | None]) -> Iterator[list[Document | None]]:
    batch: list[Document | None] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.plain()) if document is not None else 0
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _flat(parts: list[list[int]]) -> NDArray[np.int64]:
    if not parts:
        return np.zeros(0, np.int64)
    return np.concatenate([np.array(part, np.int64) for part in parts])
