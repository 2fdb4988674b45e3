"""Shuffles, mixtures and the held-out split are arithmetic, and exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from data_cases import corpus_of, loader_of, sequences_of, tokenized
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import DataError
from fivefold.engines.train.data.corpus import held_out_documents
from fivefold.engines.train.data.mixture import Mixture
from fivefold.engines.train.data.order import permutation

WEIGHTS = st.lists(
    st.decimals("0.001", 50, places=3).map(lambda d: Fraction(str(d))), min_size=1, max_size=6
)


def test_a_permutation_is_the_same_on_every_machine_and_release() -> None:
    # Worked out by SplitMix64 in plain Python integers, and written down: a change here changes
    # what every resumed run reads.
    assert permutation(10, 0, "documents").tolist() == [2, 3, 6, 1, 7, 5, 0, 8, 4, 9]


@given(st.integers(0, 500), st.integers(0, 9))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_permutation_has_every_number_once(count: int, key: int) -> None:
    assert sorted(permutation(count, key).tolist()) == list(range(count))


def test_permutations_look_uniform() -> None:
    first = np.bincount([permutation(8, key)[0] for key in range(4000)], minlength=8)
    assert abs(first - 500).max() < 5 * np.sqrt(500)


@given(WEIGHTS, st.integers(0, 10**12))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_counts_stay_within_one_a_source_of_their_exact_share(
    weights: list[Fraction], number: int
) -> None:
    counts = Mixture(weights).counts(number)
    assert sum(counts) == number
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - number * weight / sum(weights)) <= len(weights)


@given(WEIGHTS, st.integers(0, 10**9))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_each_sequence_is_the_next_of_its_source(weights: list[Fraction], start: int) -> None:
    mixture = Mixture(weights)
    counts = mixture.counts(start)
    for number in range(start, start + 40):
        source, before = mixture.locate(number)
        assert before == counts[source]
        counts[source] += 1
        assert counts == mixture.counts(number + 1)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=60), st.floats(0, 0.49))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_both_sides_of_the_split_hold_something(hashes: list[int], share: float) -> None:
    held_out = held_out_documents(np.array(hashes, np.uint64), share)
    assert len(held_out) == len(hashes)
    sides: dict[int, bool] = {}
    for value, side in zip(hashes, held_out.tolist(), strict=True):
        assert sides.setdefault(value, side) == side, "copies must be on the same side"
    if share > 0 and len(sides) > 1:
        assert 0 < held_out.sum() < len(hashes)
    else:
        assert not held_out.any()


def test_where_no_hash_is_low_enough_the_lowest_is_held_out() -> None:
    hashes = np.array([2**63 + 5, 2**63, 2**63 + 9, 2**63], np.uint64)
    assert held_out_documents(hashes, 0.02).tolist() == [False, True, False, True]


def test_more_documents_move_none_to_the_other_side() -> None:
    hashes = np.random.default_rng(0).integers(0, 2**64, 5000, np.uint64)
    few, many = held_out_documents(hashes[:1000], 0.02), held_out_documents(hashes, 0.02)
    assert (few == many[:1000]).all()
    assert 60 < many.sum() < 140


def test_held_out_data_is_read_once_and_never_trained_on(tmp_path) -> None:
    docs = [[i * 8 + j for j in range(8)] for i in range(1, 200)]
    corpus = corpus_of([tokenized(tmp_path / "s", docs)], [1], share=0.1)
    train, held_out = (
        loader_of(corpus, split=s, sequence_length=24) for s in ("train", "evaluate")
    )

    def tokens(loader, asked: int) -> list[int]:
        return [t for r in sequences_of(loader.batches(0, asked)) for t in r[0] if t]

    evaluated = tokens(held_out, 10_000)
    assert len(evaluated) == len(set(evaluated)) > 0
    assert not set(evaluated) & set(tokens(train, train.sequences))
    assert held_out.batches(held_out.sequences, 4) == []


def test_evaluation_takes_as_many_passes_on_every_rank(tmp_path) -> None:
    docs = [[i * 8 + j for j in range(8)] for i in range(1, 60)]
    corpus = corpus_of([tokenized(tmp_path / "s", docs)], [1], share=0.2)
    parts = [
        loader_of(corpus, split="evaluate", sequence_length=8, dp_rank=r, dp_size=4).batches(
            0, 1000
        )
        for r in range(4)
    ]
    assert len({len(part) for part in parts}) == 1
    learnt = sum(b.targets for part in parts for b in part)
    alone = loader_of(corpus, split="evaluate", sequence_length=8).batches(0, 1000)
    assert learnt == sum(b.targets for b in alone) > 0


def test_nothing_held_out_is_an_error_that_says_what_to_set(tmp_path) -> None:
    corpus = corpus_of([tokenized(tmp_path / "s", [[1] * 50])], [1], share=0.02)
    with pytest.raises(DataError, match=r"evaluation_share=0"):
        loader_of(corpus, split="evaluate")
