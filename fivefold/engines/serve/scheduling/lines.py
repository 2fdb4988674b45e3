"""The two lines that sequences stand in, both in the one order that never changes."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from operator import attrgetter

from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.sequence import Sequence

ORDER = attrgetter("order")


class Lines:
    """`running` have blocks; `waiting` (and those put back) have none."""

    def __init__(self, blocks: BlockManager) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._blocks = blocks

    def wait(self, sequence: Sequence) -> None:
        """Line up, at the place that its order gives it."""
        insort(self.waiting, sequence, key=ORDER)

    def run(self, sequence: Sequence) -> None:
        """From now on it runs."""
        sequence.move("running")
        insort(self.running, sequence, key=ORDER)

    def put_back_last(self) -> Sequence:
        """Take the blocks of the last that runs; it will be computed again."""
        victim = self.running.pop()
        self._blocks.release(victim.block_table)
        victim.computed = 0
        victim.move("preempted")
        self.wait(victim)
        return victim

    def leave(self, sequence: Sequence) -> None:
        """Out of its line."""
        line = self.running if sequence.state == "running" else self.waiting
        del line[bisect_left(line, sequence.order, key=ORDER)]

    def invariants(self) -> None:
        """Raise AssertionError naming what is broken."""
        for line in (self.running, self.waiting):
            if any(former.order >= latter.order for former, latter in pairwise(line)):
                raise AssertionError("sequences are out of order")
        for sequence in self.running:
            self._check_running(sequence)
        for sequence in self.waiting:
            if sequence.state not in ("waiting", "preempted"):
                raise AssertionError(f"sequence {sequence.id} is {sequence.state} and waits")
            if sequence.block_table or sequence.computed:
                raise AssertionError(f"sequence {sequence.id} waits with blocks")

    def _check_running(self, sequence: Sequence) -> None:
        blocks, held = self._blocks, len(sequence.block_table)
        if sequence.state != "running" or sequence.remaining < 1:
            raise AssertionError(f"sequence {sequence.id} is {sequence.state} and runs")
        if held < blocks.blocks_for(sequence.computed):
            raise AssertionError(f"sequence {sequence.id} has too few blocks")
        if held > blocks.blocks_for(len(sequence.tokens)):
            raise AssertionError(f"sequence {sequence.id} has too many blocks")
        for block in sequence.block_table[sequence.computed // blocks.block_size :]:
            if blocks.is_named(block):
                raise AssertionError(f"block {block} is in the index, but not full")
