"""Which queries see which keys, as few large pieces: what nobody sees is not computed.

The places that ranks hold are known to every rank, so a piece is found to be empty, whole or
causal by comparing a few numbers; only where a window or a document ends inside one is a mask
made, for that piece and at that moment.
"""

from __future__ import annotations

# B batch, S tokens of the row, Q queries, T keys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fivefold.axes.cp.split import Run, places_of
from fivefold.model.attention_backend import causal_mask


@dataclass(frozen=True)
class Piece:
    """Queries [query) against keys [key), counted among those that are there.

    kind: `whole`: every query sees every key. `causal`: both are the same tokens. `masked`: a
    mask tells.
    """

    query: slice
    key: slice
    kind: str


class Sight:
    """What the queries at `runs` of each row may see. `documents` [B,S], or None for one a row."""

    def __init__(self, runs: Sequence[Run], documents: Tensor | None) -> None:
        self.runs = tuple(runs)
        self.documents = documents
        self._pieces: dict[tuple[tuple[Run, ...], int | None], tuple[Piece, ...]] = {}
        self._spans: dict[Run, tuple[Tensor, Tensor]] = {}

    def pieces(self, keys: Sequence[Run], window: int | None) -> tuple[Piece, ...]:
        """The work of these queries on the keys at `keys`. Order is that of the queries."""
        found = self._pieces.get((tuple(keys), window))
        if found is None:
            found = self._pieces[tuple(keys), window] = self._find(tuple(keys), window)
        return found

    def mask(
        self, piece: Piece, keys: Sequence[Run], window: int | None, device: torch.device
    ) -> Tensor | None:
        """[B or 1,Q,T], True where a query of a masked piece may look; None for other pieces."""
        if piece.kind != "masked":
            return None
        query_places = places_of(self.runs, device)[piece.query]
        key_places = places_of(keys, device)[piece.key]
        mask = causal_mask(query_places.unsqueeze(0), key_places.unsqueeze(0), window)
        if self.documents is None:
            return mask
        of_queries, of_keys = self.documents[:, query_places], self.documents[:, key_places]
        return mask & (of_queries.unsqueeze(-1) == of_keys.unsqueeze(-2))

    def _find(self, keys: tuple[Run, ...], window: int | None) -> tuple[Piece, ...]:
        rows: list[list[Piece]] = []
        complete = keys == self.runs  # ... and every query sees all that come before it
        for query, query_slice in _slices(self.runs):
            row: list[Piece] = []
            for key, key_slice in _slices(keys):
                kind = self._kind(query, key, window)
                if kind is not None:
                    _append(row, Piece(query_slice, key_slice, kind))
            rows.append(row)
            seen = sum(p.key.stop - p.key.start for p in row if p.kind != "masked")
            complete = complete and seen == query_slice.stop
        if complete:
            whole = slice(0, _slices(keys)[-1][1].stop)
            return (Piece(whole, whole, "causal"),)  # all of a rank's own tokens in one call
        return tuple(_stack(rows))

    def _kind(self, query: Run, key: Run, window: int | None) -> str | None:
        """Of runs that are the same or do not overlap; None where nothing is seen."""
        if key.start >= query.stop:
            return None
        if window is not None and query.start - (key.stop - 1) >= window:
            return None
        masked = window is not None and query.stop - 1 - key.start >= window
        if self.documents is not None:
            (least, most), (low, high) = self._span(query), self._span(key)
            if bool(((low > most) | (high < least)).all()):
                return None
            masked = masked or not bool(((low == most) & (high == least)).all())
        if masked:
            return "masked"
        return "causal" if query == key else "whole"

    def _span(self, run: Run) -> tuple[Tensor, Tensor]:
        """The least and the greatest document [B] in a run."""
        if run not in self._spans:
            part = self._on_host[:, run.start : run.stop]
            self._spans[run] = (part.amin(1), part.amax(1))
        return self._spans[run]

    @cached_property
    def _on_host(self) -> Tensor:
        assert self.documents is not None
        return self.documents.cpu()  # one copy a micro-batch, for all layers


def _slices(runs: Sequence[Run]) -> list[tuple[Run, slice]]:
    """Runs that are not empty, and where each lies among the tokens of all."""
    found, start = [], 0
    for run in runs:
        stop = start + run.stop - run.start
        if stop > start:
            found.append((run, slice(start, stop)))
        start = stop
    return found


def _append(row: list[Piece], piece: Piece) -> None:
    """Add a piece of the same queries, as part of the last where the two are alike."""
    last = row[-1] if row else None
    if last and last.kind == piece.kind != "causal" and last.key.stop == piece.key.start:
        row[-1] = replace(last, key=slice(last.key.start, piece.key.stop))
    else:
        row.append(piece)


def _stack(rows: list[list[Piece]]) -> list[Piece]:
    """All pieces; those of neighbouring queries on the same keys become one."""
    found: list[Piece] = []
    for piece in (piece for row in rows for piece in row):
        for index, other in enumerate(found):
            alike = other.kind == piece.kind != "causal" and other.key == piece.key
            if alike and other.query.stop == piece.query.start:
                query = slice(other.query.start, piece.query.stop)
                found[index] = replace(other, query=query)
                break
        else:
            found.append(piece)
    return found
