"""Which source each sequence of a run comes from: exact shares, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


class Mixture:
    """A fixed interleaving of sources by weight.

    Of the first n sequences the first source has floor(n * share); the others divide the rest
    among themselves in the same way. So every source's count stays within one per source of
    its exact share for ever, and the n-th sequence is found without going through those before.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """Weights need not add up to one."""
        # Share of each source in what the sources before it left.
        self._shares = [
            weight / sum(weights[index:], Fraction(0)) for index, weight in enumerate(weights)
        ]

    def locate(self, number: int) -> tuple[int, int]:
        """Sequence `number` of the run: (its source, how many of that source came before it)."""
        for source, share in enumerate(self._shares[:-1]):
            before = _floor(number, share)
            if _floor(number + 1, share) > before:
                return source, before
            number -= before
        return len(self._shares) - 1, number

    def counts(self, number: int) -> list[int]:
        """How many of the first `number` sequences come from each source."""
        counts = []
        for share in self._shares[:-1]:
            counts.append(_floor(number, share))
            number -= counts[-1]
        return [*counts, number]


def _floor(number: int, share: Fraction) -> int:
    return number * share.numerator // share.denominator
