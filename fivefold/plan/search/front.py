"""Which of many are beaten by none in everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def front(items: Iterable[T], measures: Callable[[T], Sequence[float]]) -> list[T]:
    """The items that no other is at least as good as in every measure (less is better).

    In order of the first measure; of equals the first one stays.
    """
    kept: list[tuple[Sequence[float], T]] = []
    for item in sorted(items, key=lambda each: tuple(measures(each))):
        found = measures(item)
        if not any(_covers(other, found) for other, _ in kept):
            kept.append((found, item))
    return [item for _, item in kept]


def _covers(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))
