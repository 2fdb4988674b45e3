"""The pieces of work are exactly what a mask over the whole row lets through."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.cp.sight import Sight
from fivefold.axes.cp.split import ContextSplit, Run, places_of
from fivefold.model.attention_backend import causal_mask

CPU = torch.device("cpu")


def seen(sight: Sight, keys: tuple[Run, ...], window: int | None, batch: int) -> torch.Tensor:
    """[B,Q,T], how often each pair is computed."""
    queries, columns = len(places_of(sight.runs, CPU)), len(places_of(keys, CPU))
    counts = torch.zeros(batch, queries, columns, dtype=torch.int64)
    for piece in sight.pieces(keys, window):
        part = counts[:, piece.query, piece.key]
        mask = sight.mask(piece, keys, window, CPU)
        if piece.kind == "causal":
            assert part.shape[1] == part.shape[2]
            mask = torch.ones(part.shape[1:], dtype=torch.bool).tril()
        part += torch.ones_like(part) if mask is None else mask.long()
    return counts


def wanted(
    sight: Sight, keys: tuple[Run, ...], window: int | None, documents: torch.Tensor | None
) -> torch.Tensor:
    rows, columns = places_of(sight.runs, CPU), places_of(keys, CPU)
    mask = causal_mask(rows.unsqueeze(0), columns.unsqueeze(0), window)
    if documents is not None:
        mask = mask & (documents[:, rows].unsqueeze(-1) == documents[:, columns].unsqueeze(-2))
    return mask.long()


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    ways=st.sampled_from([(2, 1), (4, 1), (4, 2), (8, 2)]),
    multiple=st.sampled_from([None, 1]),
    length=st.integers(2, 60),
    window=st.none() | st.integers(1, 70),
    lengths=st.none() | st.lists(st.integers(1, 30), min_size=1, max_size=5),
    gathered=st.booleans(),
)
def test_pieces_are_the_mask(
    ways: tuple[int, int],
    multiple: int | None,
    length: int,
    window: int | None,
    lengths: list[int] | None,
    gathered: bool,
) -> None:
    split = ContextSplit(ways[0], 0, ways[1], multiple)
    length = split.padded(max(length, 2 * split.cp))  # a token for each chunk
    documents = None
    if lengths is not None:
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:length]
        documents = torch.full((2, length), -1)
        documents[0, : len(numbers)] = numbers
        documents[1] = torch.arange(length) // 16
    runs = [split.ring_runs(length, rank) for rank in range(split.ring)]
    sources = [tuple(sorted(sum(runs, ())))] if gathered else runs
    for mine in runs:
        sight = Sight(mine, documents)
        for keys in sources:
            found = seen(sight, keys, window, 2)
            assert torch.equal(found, wanted(sight, keys, window, documents).expand_as(found))


def test_a_ring_needs_no_mask_and_few_calls() -> None:
    split = ContextSplit(4, 1)
    runs = [split.runs(64, rank) for rank in range(4)]
    pieces = [Sight(runs[1], None).pieces(keys, None) for keys in runs]
    kinds = [[piece.kind for piece in of_source] for of_source in pieces]
    assert kinds == [["whole"], ["causal"], ["whole"], ["whole"]]
    work = [
        sum((p.query.stop - p.query.start) * (p.key.stop - p.key.start) for p in of_source)
        for of_source in pieces
    ]
    assert work == [128, 256, 128, 128]  # half of each hop, and a triangle of its own


def test_documents_that_end_at_a_border_need_no_mask() -> None:
    split = ContextSplit(2, 0)
    documents = torch.tensor([[0] * 8 + [1] * 8])
    sight = Sight(split.runs(16, 0), documents)  # chunks 0 and 3 of 4
    assert [p.kind for p in sight.pieces(split.runs(16, 0), None)] == ["causal", "causal"]
    assert [p.kind for p in sight.pieces(split.runs(16, 1), None)] == ["whole"]


def test_documents_elsewhere_cost_nothing() -> None:
    split = ContextSplit(2, 0)
    documents = torch.arange(16).unsqueeze(0) // 4
    assert Sight(split.runs(16, 0), documents).pieces(split.runs(16, 1), None) == ()


def test_a_window_skips_what_is_behind_it() -> None:
    split = ContextSplit(8, 0)
    sight = Sight(split.runs(160, 7), None)  # the middle of the row
    assert sight.pieces(split.runs(160, 0), 8) == ()
    assert sight.pieces(split.runs(160, 6), 8) != ()
