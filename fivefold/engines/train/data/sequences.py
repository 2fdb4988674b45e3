"""From documents to sequences of one length: packed end to end, or one padded document each.

Everything is found by binary search in the running sums of an epoch's documents; no token is
touched that is not asked for.
"""

from __future__ import annotations

# R rows asked for, S sequence, C documents of the split
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.engines.train.data.order import permutation
from fivefold.engines.train.data.shards import TokenizedSource

Integers = NDArray[np.int64]
NO_LABEL = -100
PADDING_DOCUMENT = -1


@dataclass(frozen=True)
class Rows:
    """[R,S] int64 each; as Batch has them."""

    tokens: Integers
    labels: Integers
    positions: Integers
    documents: Integers

    @classmethod
    def empty(cls, rows: int, length: int) -> Rows:
        """Rows to be put in."""
        return cls(*(np.empty((rows, length), np.int64) for _ in range(4)))

    def put(self, here: Integers, rows: Rows) -> None:
        """Set these rows [R]."""
        self.tokens[here] = rows.tokens
        self.labels[here] = rows.labels
        self.positions[here] = rows.positions
        self.documents[here] = rows.documents


@dataclass(frozen=True)
class Places:
    """Where the S+1 tokens of each row are ([R,S+1]): the document's rank in the epoch's order,
    the offset in it, and whether there is such a token at all.
    """

    rank: Integers
    offset: Integers
    real: NDArray[np.bool_]


class Arrangement(Protocol):
    """How the documents of one epoch lie in sequences."""

    count: int

    def places(self, sequences: Integers) -> Places:
        """Where the tokens of these sequences [R] are, and of the one that follows each."""
        ...


class Packed:
    """Documents end to end, cut every S tokens; the last sequence is padded."""

    def __init__(self, lengths: Integers, sequence_length: int) -> None:
        """`lengths` [C] in the epoch's order."""
        self._ends = np.cumsum(lengths)
        self._begins = self._ends - lengths
        self._length = sequence_length
        self._total = int(self._ends[-1]) if len(lengths) else 0
        self.count = -(-self._total // sequence_length)

    def places(self, sequences: Integers) -> Places:
        """See Arrangement."""
        place = sequences[:, None] * self._length + np.arange(self._length + 1)
        real = place < self._total
        place = np.minimum(place, self._total - 1)
        rank = np.searchsorted(self._ends, place, side="right")
        return Places(rank, place - self._begins[rank], real)


class Padded:
    """Every document from the start of a sequence; one longer than S goes on in the next."""

    def __init__(self, lengths: Integers, sequence_length: int) -> None:
        """`lengths` [C] in the epoch's order."""
        self._lengths = lengths
        self._length = sequence_length
        needed = -(-lengths // sequence_length)
        self._ends = np.cumsum(needed)
        self._begins = self._ends - needed
        self.count = int(self._ends[-1]) if len(lengths) else 0

    def places(self, sequences: Integers) -> Places:
        """See Arrangement."""
        rank = np.searchsorted(self._ends, sequences, side="right")
        part = sequences - self._begins[rank]
        offset = part[:, None] * self._length + np.arange(self._length + 1)
        last = self._lengths[rank, None] - 1
        return Places(
            np.broadcast_to(rank[:, None], offset.shape), np.minimum(offset, last), offset <= last
        )


ARRANGEMENTS: dict[str, Callable[[Integers, int], Arrangement]] = {"pack": Packed, "pad": Padded}


@dataclass(frozen=True)
class Epoch:
    """One pass: the order of the documents, their arrangement, and the order of the sequences."""

    documents: Integers
    arrangement: Arrangement
    order: Integers | None  # None: as they are


class Sequences:
    """The sequences of one split of one source, epoch after epoch, at random access."""

    def __init__(
        self,
        source: TokenizedSource,
        documents: Integers,
        *,
        sequence_length: int,
        packing: str,
        shuffle_key: tuple[int | str, ...] | None,
        padding_token: int,
    ) -> None:
        """`documents` [C]: numbers of the split's documents. No `shuffle_key`: in their order."""
        self._source = source
        self._documents = documents
        self._length = sequence_length
        self._arrange = ARRANGEMENTS[packing]
        self._key = shuffle_key
        self._padding = padding_token
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self.tokens = int(source.lengths[documents].sum())
        # The order of documents moves the cuts, never the number of sequences.
        self.count = self._arrange(source.lengths[documents], sequence_length).count

    def rows(self, numbers: Integers) -> Rows:
        """Sequences [R] of the run of this source: number // count is the epoch."""
        parts = Rows.empty(len(numbers), self._length)
        epochs = numbers // self.count
        for number in np.unique(epochs):
            here = np.flatnonzero(epochs == number)
            parts.put(here, self._read(self._epoch(int(number)), numbers[here] % self.count))
        return parts

    def _make_epoch(self, number: int) -> Epoch:
        if self._key is None:
            lengths = self._source.lengths[self._documents]
            return Epoch(self._documents, self._arrange(lengths, self._length), None)
        documents = self._documents[
            permutation(len(self._documents), *self._key, number, "documents")
        ]
        arrangement = self._arrange(self._source.lengths[documents], self._length)
        # Neighbouring sequences of a long document would share a batch: these are shuffled too.
        order = permutation(arrangement.count, *self._key, number, "sequences")
        return Epoch(documents, arrangement, order)

    def _read(self, epoch: Epoch, numbers: Integers) -> Rows:
        if epoch.order is not None:
            numbers = epoch.order[numbers]
        places = epoch.arrangement.places(numbers)
        index = self._source.starts[epoch.documents[places.rank]] + places.offset
        tokens = np.where(places.real, self._source.tokens_at(index), self._padding)
        same = places.rank[:, 1:] == places.rank[:, :-1]
        has_label = same & places.real[:, 1:]
        learnt = self._source.learnt_at(index)
        if learnt is not None:
            has_label &= learnt[:, 1:]
        real = places.real[:, :-1]
        return Rows(
            tokens=tokens[:, :-1],
            labels=np.where(has_label, tokens[:, 1:], NO_LABEL),
            # What came before the sequence is not seen, so a document's rest starts at 0 too.
            positions=np.where(real, np.minimum(places.offset[:, :-1], np.arange(self._length)), 0),
            documents=np.where(real, (places.rank - places.rank[:, :1])[:, :-1], PADDING_DOCUMENT),
        )
