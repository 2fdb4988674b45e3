"""Which replica a prompt goes to: where its beginning was read, unless that one is much busier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

REMEMBERED = 1 << 16
"""Blocks remembered a replica; the longest unused are forgotten first."""
SLACK = 4
"""A replica is much busier with more than this and twice what the least busy one has."""


class PrefixRouter:
    """Remembers the prompts each replica was given, block by block of `block_size` tokens.

    What a replica's own cache still holds is not known here; a wrong guess costs the reading of a
    prompt, no more.
    """

    def __init__(self, replicas: int, block_size: int) -> None:
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self._block_size = block_size

    def choose(self, prompt: Sequence[int], tenant: str, loads: Sequence[int | None]) -> int:
        """The place of a replica. `loads`: requests in flight at each, None where it is down.

        At least one must be up.
        """
        up = [(load, place) for place, load in enumerate(loads) if load is not None]
        least, idlest = min(up)
        blocks = list(self._blocks(prompt, tenant))
        shared, load, place = max(
            (self._shared(place, blocks), -load, -place) for load, place in up
        )
        chosen = -place if shared and -load <= 2 * least + SLACK else idlest
        self._remember(chosen, blocks)
        return chosen

    def forget(self, place: int) -> None:
        """The replica's cache is gone."""
        self._known[place].clear()

    def _blocks(self, prompt: Sequence[int], tenant: str) -> Iterator[int]:
        """A number for each whole block and all before it."""
        chain = hash(tenant)
        for start in range(0, len(prompt) - self._block_size + 1, self._block_size):
            chain = hash((chain, *prompt[start : start + self._block_size]))
            yield chain

    def _shared(self, place: int, blocks: list[int]) -> int:
        known = self._known[place]
        return next((n for n, block in enumerate(blocks) if block not in known), len(blocks))

    def _remember(self, place: int, blocks: list[int]) -> None:
        known = self._known[place]
        for block in blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > REMEMBERED:
            known.popitem(last=False)
