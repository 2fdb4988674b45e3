"""What the tests of the data package share: a small tokenizer, corpora without files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fivefold.core.config import DataSection
from fivefold.engines.train.data.batch import Batch
from fivefold.engines.train.data.corpus import Corpus
from fivefold.engines.train.data.encode import Encoded
from fivefold.engines.train.data.loader import Loader
from fivefold.engines.train.data.manifest import FORMAT, Manifest
from fivefold.engines.train.data.shards import ShardWriter, TokenizedSource

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _spellings() -> list[bytes]:
    """Bytes of each token: GPT-2 spells bytes that do not print as characters from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printed]
    of_character = {chr(b): b for b in printed} | {chr(256 + i): b for i, b in enumerate(hidden)}
    return [bytes([of_character[c]]) for c in sorted(of_character)] + [s.encode() for s in CHATML]


SPELLINGS = _spellings()


class ChatML:
    """Stands for a chat template: ChatML."""

    def render(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class ByteTokenizer:
    """Bytes as tokens 0 to 255 and three special tokens: every id can be traced to its text."""

    def __init__(self, chat: object | None = None, name: str = "bytes") -> None:
        vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        self.backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens(list(CHATML))
        self.eos_ids = [256]
        self.bos_id = None
        self.pad_id = 256
        self.chat = chat
        self.vocab_size = 259
        self.name = name

    def fingerprint(self) -> str:
        return hashlib.sha256((self.name + self.backend.to_str()).encode()).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(SPELLINGS[i] for i in ids).decode()


def section(path: Path | str, cache: Path, **more: object) -> DataSection:
    """A data section of one source; keys of DataSection go there, others to the source."""
    data = {k: more.pop(k) for k in list(more) if k in DataSection.model_fields}
    return DataSection(sources=({"path": str(path), **more},), cache=str(cache), workers=1, **data)


def tokenized(folder: Path, documents: Sequence[Sequence[int]], tasks: int = 1) -> TokenizedSource:
    """A source of these documents (ids below 2**16), written as `tasks` tasks and opened."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, np.uint16, has_answers=False)
    for part in np.array_split(np.arange(len(documents)), tasks):
        chosen = [documents[i] for i in part]
        flat = [token for document in chosen for token in document]
        hashes = [hashlib.sha256(str(d).encode()).digest()[:8] for d in chosen]
        writer.append(
            Encoded(
                np.array(flat, np.uint16),
                np.array([len(d) for d in chosen], np.int64),
                np.array([int.from_bytes(h, "little") for h in hashes], np.uint64),
                None,
                0,
            )
        )
    writer.close()
    tokens = sum(map(len, documents))
    manifest = Manifest(
        FORMAT, folder.name, "0", {}, "t", "uint16", "text", len(documents), tokens, 0,
        tuple(writer.entries),
    )  # fmt: skip
    return TokenizedSource(folder, manifest)


def corpus_of(
    sources: Sequence[TokenizedSource], weights: Sequence[int], share: float = 0.0
) -> Corpus:
    return Corpus(tuple(sources), tuple(map(Fraction, weights)), share, 0)


def loader_of(corpus: Corpus, **changed: object) -> Loader:
    settings: dict = {
        "split": "train", "sequence_length": 8, "packing": "pack", "seed": 0, "shuffle": True,
        "micro_batch": 2, "dp_rank": 0, "dp_size": 1,
    }  # fmt: skip
    return Loader(corpus, **{**settings, **changed})


def sequences_of(batches: Sequence[Batch]) -> list[tuple]:
    """Each row of the batches as plain numbers."""
    return [
        tuple(
            tuple(getattr(b, name)[row].tolist())
            for name in ("tokens", "labels", "positions", "documents")
        )
        for b in batches
        for row in range(len(b.tokens))
    ]


def pieces_of(row: tuple) -> list[tuple[list[int], list[int], list[int]]]:
    """A row cut where its documents change: (tokens, labels, positions) of each, no padding."""
    pieces: dict[int, tuple[list[int], list[int], list[int]]] = {}
    for token, label, position, document in zip(*row, strict=True):
        if document >= 0:
            piece = pieces.setdefault(document, ([], [], []))
            for held, value in zip(piece, (token, label, position), strict=True):
                held.append(value)
    return list(pieces.values())


def texts_of(corpus: Corpus, tokenizer: ByteTokenizer, number: int = 0) -> list[str]:
    source = corpus.sources[number]
    return [
        tokenizer.decode(source.tokens_at(np.arange(start, start + length))).removesuffix(
            "<|endoftext|>"
        )
        for start, length in zip(source.starts, source.lengths, strict=True)
    ]


def folder_of(cache: Path) -> Path:
    (manifest,) = (cache / "tokens").rglob("manifest.json")
    return manifest.parent
