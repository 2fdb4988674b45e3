"""Micro-batches of one rank, as a pure function of how many sequences were consumed."""

from __future__ import annotations

# B batch, S sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fivefold.core.errors import DataError
from fivefold.engines.train.data.batch import Batch
from fivefold.engines.train.data.corpus import Corpus, Split
from fivefold.engines.train.data.mixture import Mixture
from fivefold.engines.train.data.sequences import NO_LABEL, Rows, Sequences


class Loader:
    """Sequences 0, 1, 2, ... of a run. Sequence i is the same whatever the ranks and batches."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        split: Split,
        sequence_length: int,
        packing: Literal["pack", "pad"],
        seed: int,
        shuffle: bool,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        """Raises DataError when a source cannot fill one sequence, or nothing is held out."""
        self._micro_batch = micro_batch
        self._rank, self._ranks = dp_rank, dp_size
        self._split = split
        self._length = sequence_length
        self._sources: list[Sequences] = []
        self._names: list[str] = []
        weights = []
        for number, source in enumerate(corpus.sources):
            documents = corpus.documents(number, split)
            sequences = Sequences(
                source,
                documents,
                sequence_length=sequence_length,
                packing=packing,
                shuffle_key=(seed, number) if shuffle else None,
                padding_token=corpus.padding_token,
            )
            if split == "evaluate" and not len(documents):
                continue  # a source of one document: the others stand for it
            if split == "train" and packing == "pack" and sequences.tokens < sequence_length:
                raise _too_small(source.manifest.source, sequences.tokens, sequence_length)
            self._sources.append(sequences)
            self._names.append(source.manifest.source)
            weights.append(corpus.weights[number])
        if not self._sources:
            raise DataError(
                "no document is held out: a source needs two different documents for that",
                "set data.evaluation_share=0, or give more documents",
            )
        self._mixture = Mixture(weights)

    @property
    def sequences(self) -> int:
        """Sequences of one pass over all sources."""
        return sum(source.count for source in self._sources)

    def epochs(self, consumed: int) -> dict[str, float]:
        """How many passes over each source `consumed` sequences make."""
        counts = self._mixture.counts(consumed)
        return {
            name: count / source.count
            for name, source, count in zip(self._names, self._sources, counts, strict=True)
        }

    def batches(self, consumed: int, global_batch: int) -> list[Batch]:
        """This rank's part of sequences [consumed, consumed + global_batch), as micro-batches.

        The parts of all ranks are disjoint and make up the whole; each is one run of
        neighbours. Every rank gets as many micro-batches of the same sizes: where the sequences
        do not divide evenly, a rank that is one short repeats one without labels. Held-out data
        is passed once: fewer sequences come where it ends.
        """
        if self._split == "evaluate":
            global_batch = max(0, min(global_batch, self.sequences - consumed))
        if not global_batch:
            return []
        most = -(-global_batch // self._ranks)
        each, more = divmod(global_batch, self._ranks)
        start = self._rank * each + min(self._rank, more)
        own = each + (self._rank < more)
        numbers = consumed + np.minimum(start + np.arange(most), global_batch - 1)
        rows = self._rows(numbers)
        rows.labels[own:] = NO_LABEL
        return [
            _batch(rows, slice(at, at + self._micro_batch))
            for at in range(0, most, self._micro_batch)
        ]

    def _rows(self, numbers: NDArray[np.int64]) -> Rows:
        located = np.array([self._mixture.locate(int(number)) for number in numbers], np.int64)
        rows = Rows.empty(len(numbers), self._length)
        for source in np.unique(located[:, 0]):
            here = np.flatnonzero(located[:, 0] == source)
            rows.put(here, self._sources[source].rows(located[here, 1]))
        return rows


def _batch(rows: Rows, part: slice) -> Batch:
    return Batch(
        tokens=torch.from_numpy(rows.tokens[part]),
        labels=torch.from_numpy(rows.labels[part]),
        positions=torch.from_numpy(rows.positions[part]),
        documents=torch.from_numpy(rows.documents[part]),
    )


def _too_small(name: str, tokens: int, sequence_length: int) -> DataError:
    return DataError(
        f"data source {name} has {tokens} tokens to train on, "
        f"fewer than one sequence of {sequence_length}",
        "lower data.sequence_length, give more text, or set data.packing=pad",
    )
