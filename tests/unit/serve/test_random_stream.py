from __future__ import annotations

import math

from fivefold.engines.serve.random_stream import fresh_seed, uniform


def test_known_values_never_change() -> None:
    """A seed printed in a paper must give the same text next year."""
    assert [uniform(0, 0), uniform(0, 1), uniform(7, 3)] == KNOWN


KNOWN = [0.6524484863740322, 0.7012121095215252, 0.6042348053683145]


def test_uniform_over_indices_and_over_neighbouring_seeds() -> None:
    for numbers in (
        [uniform(11, n) for n in range(20_000)],
        [uniform(s, 5) for s in range(20_000)],
    ):
        assert all(0 <= x < 1 for x in numbers)
        bins = [0] * 50
        for x in numbers:
            bins[int(x * 50)] += 1
        chi_square = sum((b - 400) ** 2 / 400 for b in bins)
        assert chi_square < 49 + 4 * math.sqrt(2 * 49)


def test_neighbouring_seeds_are_unrelated() -> None:
    count = 20_000
    products = [(uniform(s, 0) - 0.5) * (uniform(s + 1, 0) - 0.5) for s in range(count)]
    correlation = 12 * sum(products) / count
    assert abs(correlation) < 4 / math.sqrt(count)
    overlap = {uniform(1, n) for n in range(1000)} & {uniform(2, n) for n in range(1000)}
    assert not overlap


def test_fresh_seeds_differ() -> None:
    assert fresh_seed() != fresh_seed()
