"""The tokenized sources of a run, and which of their documents are held out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.engines.train.data.shards import TokenizedSource

Split = Literal["train", "evaluate"]


@dataclass(frozen=True)
class Corpus:
    """Sources with their weights, the share of documents held out, and the id that pads."""

    sources: tuple[TokenizedSource, ...]
    weights: tuple[Fraction, ...]
    evaluation_share: float
    padding_token: int

    def documents(self, source: int, split: Split) -> NDArray[np.int64]:
        """Numbers of the documents of a source that belong to `split`, ascending."""
        held_out = held_out_documents(self.sources[source].hashes, self.evaluation_share)
        return np.flatnonzero(held_out if split == "evaluate" else ~held_out)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the sequences of this corpus."""
        parts = [f"{self.evaluation_share} {self.padding_token}"]
        parts += [
            f"{source.manifest.source_sha256} {source.manifest.tokenizer} {source.manifest.form} {weight}"
            for source, weight in zip(self.sources, self.weights, strict=True)
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def describe(self) -> list[str]:
        """One line a source, for people."""
        lines = []
        for number, source in enumerate(self.sources):
            held_out = len(self.documents(number, "evaluate"))
            lines.append(
                f"{source.manifest.source}: {source.manifest.documents:,} documents "
                f"({held_out:,} held out), {source.manifest.tokens:,} tokens"
            )
        return lines


def held_out_documents(hashes: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Whether each document is held out: where its hash is below `share` of all hashes.

    So a document stays on its side when others come or go, and copies of it are on the same.
    Of two or more different documents at least one is held out and one is not.
    """
    if share == 0 or not len(hashes):
        return np.zeros(len(hashes), np.bool_)
    chosen = hashes < np.uint64(int(share * 2**64))
    if not chosen.any() and hashes.min() < hashes.max():
        chosen = hashes == hashes.min()
    if chosen.all():
        chosen = hashes < hashes.max()
    return chosen
