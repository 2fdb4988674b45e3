"""Whatever the documents and settings: nothing lost, nothing twice, nothing across documents."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from data_cases import corpus_of, loader_of, pieces_of, sequences_of, tokenized
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import DataError
from fivefold.engines.train.data.corpus import Corpus
from fivefold.engines.train.data.loader import Loader

PROFILE = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def documents(draw: st.DrawFn) -> list[list[int]]:
    """Documents whose tokens are all different, so that each can be traced."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=25))
    counter = itertools.count(1)
    return [list(itertools.islice(counter, n)) for n in lengths]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], dict]:
    docs = draw(documents())
    setting = {
        "packing": draw(st.sampled_from(["pack", "pad"])),
        "sequence_length": draw(st.integers(2, 40)),
        "seed": draw(st.integers(0, 2**31)),
        "shuffle": draw(st.booleans()),
        "micro_batch": draw(st.integers(1, 4)),
    }
    if setting["packing"] == "pack":
        setting["sequence_length"] = min(setting["sequence_length"], max(2, sum(map(len, docs))))
    return docs, setting


def built(docs: Sequence[Sequence[int]]) -> Corpus:
    with tempfile.TemporaryDirectory() as folder:  # mapped files outlive their names
        return corpus_of([tokenized(Path(folder) / "source", docs, tasks=3)], [1])


@pytest.fixture(params=[1 << 26, 16], ids=["one shard", "many shards"], autouse=True)
def shard_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.engines.train.data.shards.SHARD_TOKENS", request.param)


def fits(docs: Sequence[Sequence[int]], setting: dict) -> bool:
    return setting["packing"] == "pad" or sum(map(len, docs)) >= setting["sequence_length"]


@given(cases())
@PROFILE
def test_an_epoch_holds_every_token_once_and_no_label_crosses(case: tuple) -> None:
    docs, setting = case
    if not fits(docs, setting):
        return
    loader = loader_of(built(docs), **setting)
    following = {a: b for d in docs for a, b in itertools.pairwise(d)}
    for epoch in range(2):
        rows = sequences_of(loader.batches(epoch * loader.sequences, loader.sequences))
        assert len(rows) == loader.sequences
        seen: Counter[int] = Counter()
        learnt: Counter[int] = Counter()
        for row in rows:
            for tokens, labels, positions in pieces_of(row):
                seen.update(tokens)
                learnt.update(label for label in labels if label != -100)
                # A piece is a run of one document, in order, with positions from 0.
                assert all(following[a] == b for a, b in itertools.pairwise(tokens))
                assert positions == list(range(len(tokens)))
                # The label is the next token of the document and of no other.
                assert labels[:-1] == tokens[1:]
                assert labels[-1] in (-100, following.get(tokens[-1]))
            padding = [i for i, d in enumerate(row[3]) if d == -1]
            assert all(row[1][i] == -100 and row[0][i] == 0 for i in padding)
            assert padding == list(range(len(row[3]) - len(padding), len(row[3])))
        assert seen == Counter(token for d in docs for token in d)
        if setting["packing"] == "pack":
            # Every token but each document's first is predicted exactly once, over the cuts too.
            assert learnt == Counter(following.values())


@given(cases(), st.integers(0, 60), st.integers(1, 24))
@PROFILE
def test_ranks_are_disjoint_and_their_union_is_the_same_for_every_world(
    case: tuple, consumed: int, global_batch: int
) -> None:
    docs, setting = case
    if not fits(docs, setting):
        return
    corpus = built(docs)
    whole = sequences_of(loader_of(corpus, **setting).batches(consumed, global_batch))
    assert len(whole) == global_batch
    for size in (2, 4, 8):
        parts = [
            loader_of(corpus, **setting, dp_rank=rank, dp_size=size).batches(consumed, global_batch)
            for rank in range(size)
        ]
        shapes = {tuple(tuple(b.tokens.shape) for b in part) for part in parts}
        assert len(shapes) == 1, "every rank must take as many forward passes"
        union: list[tuple] = []
        for rank, part in enumerate(parts):
            own = global_batch // size + (rank < global_batch % size)
            rows = sequences_of(part)
            union += rows[:own]
            assert all(set(row[1]) == {-100} for row in rows[own:]), "fillers must not be learnt"
        assert union == whole


@given(cases(), st.lists(st.integers(1, 9), min_size=1, max_size=6))
@PROFILE
def test_resuming_anywhere_continues_the_straight_run(case: tuple, steps: list[int]) -> None:
    docs, setting = case
    if not fits(docs, setting):
        return
    corpus = built(docs)
    straight = sequences_of(loader_of(corpus, **setting).batches(0, sum(steps)))
    resumed, consumed = [], 0
    for step in steps:
        # A new loader each time: nothing but `consumed` is carried over.
        resumed += sequences_of(loader_of(corpus, **setting).batches(consumed, step))
        consumed += step
    assert resumed == straight


@given(documents(), documents(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
@PROFILE
def test_a_mixture_passes_each_source_at_its_own_pace(
    one: list, two: list, a: int, b: int, seed: int
) -> None:
    two = [[token + 10_000 for token in d] for d in two]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [tokenized(folder / "one", one), tokenized(folder / "two", two)]
    loader = loader_of(corpus_of(sources, [a, b]), packing="pad", sequence_length=4, seed=seed)
    rows = sequences_of(loader.batches(0, 60))
    for own, docs in ((lambda t: t < 10_000, one), (lambda t: t >= 10_000, two)):
        mine = [row for row in rows if own(row[0][0])]
        needed = sum(-(-len(d) // 4) for d in docs)
        for start in range(0, len(mine) - needed + 1, needed):
            epoch = mine[start : start + needed]
            seen = Counter(t for row in epoch for piece in pieces_of(row) for t in piece[0])
            assert seen == Counter(t for d in docs for t in d)
    passes = loader.epochs(60)
    assert sum(1 for row in rows if row[0][0] < 10_000) == pytest.approx(
        passes["one"] * sum(-(-len(d) // 4) for d in one)
    )


def test_epochs_and_seeds_differ_and_repeat() -> None:
    corpus = built([[i * 10 + j for j in range(7)] for i in range(1, 40)])

    def order(**changed: object) -> list[tuple]:
        loader: Loader = loader_of(corpus, **{"sequence_length": 16, **changed})
        return sequences_of(loader.batches(0, 2 * loader.sequences))

    half = len(order()) // 2
    assert order() == order()
    assert order()[:half] != order()[half:]
    assert order(seed=1) != order()
    straight = order(shuffle=False)
    assert straight[:half] == straight[half:]


def test_the_neighbours_of_a_long_document_do_not_share_a_batch() -> None:
    loader = loader_of(built([list(range(1, 4001))]), sequence_length=40)
    starts = [row[0][0] for row in sequences_of(loader.batches(0, 100))]
    assert sum(b - a == 40 for a, b in itertools.pairwise(starts)) < 10


def test_too_small_a_corpus_names_both_numbers() -> None:
    with pytest.raises(DataError, match=r"has 12 tokens .* one sequence of 16"):
        loader_of(built([[1] * 5, [2] * 7]), sequence_length=16)
    assert loader_of(built([[1] * 5, [2] * 7]), sequence_length=16, packing="pad").sequences == 2
