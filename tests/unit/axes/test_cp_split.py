"""Every token is on one rank, and causal work is the same everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.cp.split import ContextSplit, places_of, tokens_in
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout

CPU = torch.device("cpu")
WAYS = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (8, 1), (8, 4), (6, 3)])


def rows(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length)


@settings(deadline=None, derandomize=True)
@given(ways=WAYS, length=st.integers(1, 90), multiple=st.sampled_from([None, 1, 5]))
def test_split_and_join_are_inverse(
    ways: tuple[int, int], length: int, multiple: int | None
) -> None:
    cp, ulysses = ways
    splits = [ContextSplit(cp, rank, ulysses, multiple) for rank in range(cp)]
    if splits[0].padded(length) < 2 * cp:
        with pytest.raises(LayoutError, match="does not fill"):
            splits[0].split(*[rows(2, length)] * 3, None)
        return
    whole, positions = rows(2, length), rows(2, length) % 7
    parts = [s.split(whole, whole + 1, positions, whole // 5) for s in splits]
    total = splits[0].padded(length)
    assert all(part.length == total for part in parts)
    joined = [
        splits[0].join([getattr(part, name) for part in parts], total)
        for name in ("tokens", "labels", "positions")
    ]
    for found, wanted in zip(joined, (whole, whole + 1, positions), strict=True):
        assert torch.equal(found[:, :length], wanted)
    assert (joined[1][:, length:] == -100).all()
    assert sum(part.targets for part in parts) == 2 * length
    documents = parts[0].documents
    assert documents is not None and torch.equal(documents[:, :length], whole // 5)
    assert (documents[:, length:] == -1).all()


@pytest.mark.parametrize(("cp", "ulysses"), [(2, 1), (4, 1), (8, 1), (8, 2), (8, 4)])
def test_causal_work_is_even(cp: int, ulysses: int) -> None:
    split = ContextSplit(cp, 0, ulysses)
    seen = [
        int((places_of(split.ring_runs(480, rank), CPU) + 1).sum()) for rank in range(split.ring)
    ]
    assert max(seen) == min(seen)


def test_unpadded_ranks_differ_by_little() -> None:
    split = ContextSplit(4, 0, multiple=1)
    lengths = [tokens_in(split.runs(101, rank)) for rank in range(4)]
    assert sum(lengths) == 101
    assert max(lengths) - min(lengths) <= 2


@pytest.mark.parametrize(("cp", "ulysses"), [(4, 2), (8, 4), (6, 3)])
def test_head_sharing_ranks_hold_what_a_rank_of_the_ring_would(cp: int, ulysses: int) -> None:
    split = ContextSplit(cp, 0, ulysses)
    alone = ContextSplit(cp // ulysses, 0)
    for ring_rank in range(split.ring):
        together = torch.cat(
            [places_of(split.runs(96, ring_rank * ulysses + rank), CPU) for rank in range(ulysses)]
        )
        wanted = places_of(alone.runs(96, ring_rank), CPU)
        assert torch.equal(together.sort().values, wanted)
        assert torch.equal(places_of(split.ring_runs(96, ring_rank), CPU), wanted)


def test_ranks_of_a_layout() -> None:
    split = ContextSplit.of(Layout(cp=4, ulysses=2, tp=3), 3)
    assert (split.ring_rank, split.ulysses_rank) == (1, 1)
    assert split.padded(1) == 24  # chunks are equal, and 6 tokens divide by tp=3
    assert tokens_in(split.runs(24, 3)) == 6
