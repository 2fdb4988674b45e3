"""Which tokens of a row a rank holds, so that causal attention costs every rank the same.

A row is cut into 2 * cp chunks; rank r holds chunks r and 2 * cp - 1 - r ("zig-zag", head and
tail: Llama 3, Dubey et al. 2024; Brandon et al. 2023). An early chunk sees few keys and its late
twin sees many, and their sum is the same for every rank. Positions are the data's own, and
labels name the next token already, so neither changes at a border.
"""

from __future__ import annotations

# B batch, S tokens of the whole row, L tokens of this rank
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout

NO_LABEL = -100
NO_DOCUMENT = -1


class Run(NamedTuple):
    """The places [start, stop) of a row."""

    start: int
    stop: int


@dataclass(frozen=True)
class LocalBatch:
    """What one rank computes of a micro-batch.

    tokens, labels, positions: [B,L] int64, this rank's tokens in the order of their places.
    documents: [B,S] int64 of the WHOLE padded row, or None: attention must know those of the
        keys that other ranks hold, and every rank has read the row anyway.
    places: [L] int64, where in the row each of this rank's tokens stands.
    length: S, padding included.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    places: Tensor
    length: int

    @property
    def targets(self) -> int:
        """How many of this rank's tokens have a label."""
        return int((self.labels != NO_LABEL).sum())


@dataclass(frozen=True)
class ContextSplit:
    """The division of rows over `cp` ranks, seen from rank `rank` of them.

    Ranks stand in `cp / ulysses` groups of `ulysses` neighbours that share out heads: such a
    group holds, together, what one rank of a ring of `cp / ulysses` would.
    multiple: rows are padded to a multiple of it; None is 2 * cp, by which all chunks are equally
        long. 1 pads nothing: ranks then differ by a token or two.
    """

    cp: int
    rank: int
    ulysses: int = 1
    multiple: int | None = None

    @classmethod
    def of(cls, layout: Layout, rank: int) -> ContextSplit:
        """For context rank `rank` of `layout`: what it holds divides once more over `tp`."""
        return cls(layout.cp, rank, layout.ulysses, layout.cp * math.lcm(2, layout.tp))

    @property
    def ring(self) -> int:
        """Ranks among which keys and values move."""
        return self.cp // self.ulysses

    @property
    def ring_rank(self) -> int:
        """Which of the ring's ranks this is."""
        return self.rank // self.ulysses

    @property
    def ulysses_rank(self) -> int:
        """Which of the head-sharing ranks this is."""
        return self.rank % self.ulysses

    def padded(self, length: int) -> int:
        """The length of a row of `length` tokens once padded."""
        multiple = self.multiple or 2 * self.cp
        return -(-length // multiple) * multiple

    def runs(self, length: int, rank: int) -> tuple[Run, ...]:
        """Places that `rank` holds of a row of `length` tokens, padding included."""
        return self._twins(length, rank, 1)

    def ring_runs(self, length: int, ring_rank: int) -> tuple[Run, ...]:
        """Places that the head-sharing ranks at `ring_rank` of the ring hold together."""
        return self._twins(length, ring_rank * self.ulysses, self.ulysses)

    def split(
        self, tokens: Tensor, labels: Tensor, positions: Tensor, documents: Tensor | None
    ) -> LocalBatch:
        """This rank's part of rows [B,S]; padding goes to the end, where causality hides it.

        Raises LayoutError when some chunk would get no token, as unpadded rows can.
        """
        length = self.padded(tokens.shape[1])
        if length < 2 * self.cp:
            raise LayoutError(
                f"a row of {length} tokens does not fill the {2 * self.cp} chunks of cp={self.cp}",
                "use fewer context ranks or longer sequences",
            )
        if documents is not None:
            documents = _pad(documents, length, NO_DOCUMENT)
        return LocalBatch(
            self.cut(_pad(tokens, length, 0)),
            self.cut(_pad(labels, length, NO_LABEL)),
            self.cut(_pad(positions, length, 0)),
            documents,
            places_of(self.runs(length, self.rank), tokens.device),
            length,
        )

    def cut(self, whole: Tensor) -> Tensor:
        """[B,L,...], this rank's tokens of a padded row [B,S,...]."""
        runs = self.runs(whole.shape[1], self.rank)
        return torch.cat([whole[:, run.start : run.stop] for run in runs], dim=1)

    def join(self, parts: Sequence[Tensor], length: int) -> Tensor:
        """[B,S,...] from every rank's [B,L,...]; `length` is S, padding included."""
        device = parts[0].device
        order = [places_of(self.runs(length, rank), device) for rank in range(self.cp)]
        return torch.cat(list(parts), dim=1).index_select(1, torch.cat(order).argsort())

    def _twins(self, length: int, first: int, count: int) -> tuple[Run, ...]:
        chunks = 2 * self.cp
        edges = [length * chunk // chunks for chunk in range(chunks + 1)]
        head = Run(edges[first], edges[first + count])
        tail = Run(edges[chunks - first - count], edges[chunks - first])
        return (head, tail)


def places_of(runs: Sequence[Run], device: torch.device) -> Tensor:
    """[tokens] int64, the places in `runs` one after the other."""
    return torch.cat([torch.arange(*run, device=device) for run in runs])


def tokens_in(runs: Sequence[Run]) -> int:
    """How many places `runs` are."""
    return sum(run.stop - run.start for run in runs)


def _pad(row: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - row.shape[1]), value=value)
