"""One step in the making: the policy."""

from __future__ import annotations

from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.lines import Lines
from fivefold.engines.serve.scheduling.plan import Chunk, StepPlan
from fivefold.engines.serve.scheduling.prefix import PrefixIndex
from fivefold.engines.serve.scheduling.sequence import Sequence


class Draft:
    """Chunks for those that run, then for those that can start."""

    def __init__(
        self,
        blocks: BlockManager,
        prefix: PrefixIndex,
        lines: Lines,
        max_sequences: int,
        token_budget: int,
    ) -> None:
        self._blocks = blocks
        self._prefix = prefix
        self._lines = lines
        self._max_sequences = max_sequences
        singles = 0
        for sequence in lines.running:
            singles += len(sequence.tokens) - sequence.computed == 1
        self._budget = token_budget - singles  # what is left for prompts
        self._singles: list[Chunk] = []
        self._prompts: list[Chunk] = []
        self._preempted: list[Sequence] = []
        self._copies: list[tuple[int, int]] = []
        self._coming: set[bytes] = set()  # keys of blocks that this step completes

    def plan(self) -> StepPlan:
        """Fill the draft. Nothing starts in a step that had to put others back."""
        self._continue_running()
        if not self._preempted:
            self._start_waiting()
        chunks = (*self._singles, *self._prompts)
        return StepPlan(chunks, tuple(self._preempted), tuple(self._copies))

    def _continue_running(self) -> None:
        blocks, running = self._blocks, self._lines.running
        size = blocks.block_size
        place = 0
        while place < len(running):  # those behind `place` may be put back meanwhile
            sequence = running[place]
            place += 1
            start = sequence.computed
            remaining = len(sequence.tokens) - start
            count = 1 if remaining == 1 else min(remaining, self._budget)
            if count == 0:
                continue
            table = sequence.block_table
            roomy = start + count <= len(table) * size and blocks.count(table[start // size]) == 1
            if not roomy and not self._make_room(sequence, start + count):
                continue
            if remaining == 1:
                self._singles.append(Chunk(sequence, start, 1, True))
            else:
                self._read_prompt(sequence, count)

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Slots for `length` tokens, the next ones in blocks that nobody else sees.

        Takes blocks from the last in order until there are enough: False when that is `sequence`
        itself, which is then put back.
        """
        blocks, table = self._blocks, sequence.block_table
        first = sequence.computed // blocks.block_size
        while True:
            shared = first < len(table) and blocks.count(table[first]) > 1
            if blocks.blocks_for(length) - len(table) + shared <= blocks.available:
                break
            victim = self._lines.put_back_last()
            self._preempted.append(victim)
            if victim is sequence:
                return False
        if shared:
            self._copies.append(blocks.make_private(table, first))
        self._reach(table, length)
        return True

    def _start_waiting(self) -> None:
        """Start sequences in order until one does not fit.

        One that waits for a block that this step completes keeps a place, so that those behind
        it cannot take all of them.
        """
        waiting, running = self._lines.waiting, self._lines.running
        place = 0
        while place < len(waiting) and self._budget:
            if len(running) + place >= self._max_sequences:
                return
            sequence = waiting[place]
            found = self._find(sequence)
            if self._is_coming(sequence, len(found)):
                place += 1
                continue
            if not self._fits(sequence, found):
                return
            del waiting[place]
            self._start(sequence, found)

    def _find(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its beginning; a token is left to compute."""
        if not sequence.match_prefix:
            return []
        whole = self._matchable(sequence)
        keys = self._prefix.extend(sequence.keys, sequence.tokens, sequence.salt, whole)
        return self._prefix.lookup(keys[:whole])

    def _is_coming(self, sequence: Sequence, found: int) -> bool:
        if not sequence.match_prefix or found == self._matchable(sequence):
            return False
        return sequence.keys[found] in self._coming

    def _matchable(self, sequence: Sequence) -> int:
        return (len(sequence.tokens) - 1) // self._blocks.block_size

    def _fits(self, sequence: Sequence, found: list[int]) -> bool:
        """All of its present tokens have blocks, and each that runs may take one more soon."""
        blocks = self._blocks
        revived = sum(blocks.count(block) == 0 for block in found)
        needed = blocks.blocks_for(len(sequence.tokens)) - len(found) + revived
        return needed + len(self._lines.running) <= blocks.available

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        sequence.block_table = self._blocks.fork(found)
        sequence.computed = len(found) * self._blocks.block_size
        if sequence.state == "waiting" and sequence.match_prefix:
            sequence.hit = sequence.computed
            self._prefix.record(len(sequence.tokens), sequence.hit)
        self._lines.run(sequence)
        count = min(sequence.remaining, self._budget)
        self._reach(sequence.block_table, sequence.computed + count)
        self._read_prompt(sequence, count)

    def _reach(self, table: list[int], length: int) -> None:
        while len(table) * self._blocks.block_size < length:
            table.append(self._blocks.allocate())

    def _read_prompt(self, sequence: Sequence, count: int) -> None:
        start, size = sequence.computed, self._blocks.block_size
        self._budget -= count
        self._prompts.append(Chunk(sequence, start, count, count == sequence.remaining))
        first, end = start // size, (start + count) // size
        keys = self._prefix.extend(sequence.keys, sequence.tokens, sequence.salt, end)
        self._coming.update(keys[first:end])
