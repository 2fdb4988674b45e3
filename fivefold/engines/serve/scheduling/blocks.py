"""Who has which block of the paged cache (Kwon et al. 2023)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from fivefold.engines.serve.scheduling.errors import SchedulingError


class BlockManager:
    """`num_blocks` blocks of `block_size` slots, each free, cached or owned.

    An owned block has a count of the tables that list it. A *named* block (its contents can be
    found in the prefix index) becomes cached when its count falls to 0, any other becomes free.
    Allocation takes free blocks first, then the cached block that was released longest ago;
    `on_evict` is told of that one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SchedulingError(f"{name}={value!r}", f"{name} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = lambda block: None
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; the first to go is block 0
        self._cached: OrderedDict[int, None] = OrderedDict()  # released longest ago first
        self._named: set[int] = set()
        self._counts = [0] * num_blocks

    @property
    def available(self) -> int:
        """Blocks that allocation can give."""
        return len(self._free) + len(self._cached)

    @property
    def free_count(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that nobody owns, kept for their contents."""
        return len(self._cached)

    @property
    def owned_count(self) -> int:
        """Blocks in some table."""
        return self.num_blocks - self.available

    def blocks_for(self, slots: int) -> int:
        """Blocks that hold this many slots."""
        return -(-slots // self.block_size)

    def count(self, block: int) -> int:
        """Tables that list the block."""
        return self._counts[block]

    def allocate(self) -> int:
        """A block of one's own. Raises SchedulingError when all are owned."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._named.discard(block)
            self.on_evict(block)
        else:
            raise SchedulingError(
                f"all {self.num_blocks} blocks of the cache are owned", "preempt a sequence first"
            )
        self._counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table lists the block, which is owned or cached."""
        if self._counts[block] == 0:
            if block not in self._cached:
                raise SchedulingError(f"block {block} is free", "allocate it")
            del self._cached[block]
        self._counts[block] += 1

    def release(self, table: list[int]) -> None:
        """Empty a table: one less lists each of its blocks.

        From the end: the last blocks of a prefix are of no use without the first, so they are
        evicted first.
        """
        while table:
            self._release(table.pop())

    def fork(self, table: Sequence[int]) -> list[int]:
        """A second table of the same blocks."""
        for block in table:
            self.share(block)
        return list(table)

    def make_private(self, table: list[int], index: int) -> tuple[int, int]:
        """Replace a shared block of the table, which is about to be written, by a new one.

        Returns (source, destination) of the copy to make.
        """
        block = table[index]
        if self._counts[block] < 2:
            raise SchedulingError(f"block {block} is not shared", "write to it as it is")
        table[index] = self.allocate()
        self._release(block)
        return block, table[index]

    def name(self, block: int) -> None:
        """Keep the contents of an owned block when its count falls to 0."""
        if self._counts[block] == 0:
            raise SchedulingError(f"block {block} is not owned", "name it while a table lists it")
        self._named.add(block)

    def unname(self, block: int) -> None:
        """The contents are of no use any more."""
        self._named.discard(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def is_named(self, block: int) -> bool:
        """Whether the prefix index leads to the block."""
        return block in self._named

    def _release(self, block: int) -> None:
        if self._counts[block] == 0:
            raise SchedulingError(f"block {block} is not owned", "release a block once a table")
        self._counts[block] -= 1
        if self._counts[block] == 0:
            if block in self._named:
                self._cached[block] = None
            else:
                self._free.append(block)

    def invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError naming what is broken; `tables` are all that exist."""
        counts = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        for block in range(self.num_blocks):
            states = free[block] + (block in self._cached) + (self._counts[block] > 0)
            if states != 1:
                raise AssertionError(
                    f"block {block} is in {states} states: {free[block]} times free,"
                    f" cached {block in self._cached}, count {self._counts[block]}"
                )
            if counts[block] != self._counts[block]:
                raise AssertionError(
                    f"block {block} is in {counts[block]} tables, its count is {self._counts[block]}"
                )
            if block in self._cached and block not in self._named:
                raise AssertionError(f"block {block} is cached without a name")
            if free[block] and block in self._named:
                raise AssertionError(f"block {block} is free and has a name")
        if len(self._free) + len(self._cached) + self.owned_count != self.num_blocks:
            raise AssertionError("free, cached and owned blocks do not add up")
