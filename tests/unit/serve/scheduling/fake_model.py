"""A model whose keys are hashes: whatever it reads wrongly, it knows."""

from __future__ import annotations

from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.plan import Chunk, StepPlan
from fivefold.engines.serve.scheduling.sequence import Sequence

VOCABULARY = 3  # few, so that prompts and answers often begin alike


def prefix_hashes(
    tokens: list[int], salt: bytes, version: bytes, known: list[int] | None = None
) -> list[int]:
    """One hash a token, of all tokens up to it, the salt and the weights' version."""
    hashes = [] if known is None else known
    value = hashes[-1] if hashes else hash((salt, version))
    for token in tokens[len(hashes) :]:
        value = hash((value, token))
        hashes.append(value)
    return hashes


def next_token(value: int) -> int:
    """What the model says after a prefix of this hash."""
    return (value >> 7) % VOCABULARY


def answer(prompt: list[int], count: int, salt: bytes = b"", version: bytes = b"") -> list[int]:
    """What a prompt gives without any scheduler, cache or neighbour."""
    tokens = list(prompt)
    hashes: list[int] = []
    for _ in range(count):
        hashes = prefix_hashes(tokens, salt, version, hashes)
        tokens.append(next_token(hashes[-1]))
    return tokens[len(prompt) :]


class FakeModel:
    """Each slot of the cache holds the hash of the whole prefix that ends there.

    A chunk finds the hashes of exactly its own prefix in all slots before it, or the test fails:
    a stale, freed, foreign, uncopied or overwritten slot cannot hold them.
    """

    def __init__(self, blocks: BlockManager, version: bytes = b"") -> None:
        self.blocks = blocks
        self.version = version
        self.slots: list[list[int | None]] = [
            [None] * blocks.block_size for _ in range(blocks.num_blocks)
        ]
        self._hashes: dict[Sequence, list[int]] = {}

    def compute(self, plan: StepPlan) -> dict[int, int]:
        """Run a step: the next token of every sequence that samples, by id."""
        self._copy(plan)
        for chunk in plan.chunks:
            self._check(chunk, chunk.start)  # before any writing: chunks do not need each other
        for chunk in plan.chunks:
            self._write(chunk)
        for chunk in plan.chunks:
            self._check(chunk, chunk.start + chunk.count)
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        return {s.id: next_token(self._read(s, len(s.tokens))[-1]) for s in sampling}

    def crash(self, plan: StepPlan) -> None:
        """Leave nonsense wherever the plan writes."""
        size = self.blocks.block_size
        for _, destination in plan.copies:
            self.slots[destination] = [-1] * size
        for chunk in plan.chunks:
            for place in range(chunk.start, chunk.start + chunk.count):
                self.slots[chunk.sequence.block_table[place // size]][place % size] = -1

    def new_weights(self, version: bytes) -> None:
        """Other weights give other keys for the same tokens."""
        self.version = version
        self._hashes.clear()

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._hashes.pop(sequence, None)

    def _copy(self, plan: StepPlan) -> None:
        destinations = [destination for _, destination in plan.copies]
        assert len(set(destinations)) == len(destinations)
        together = {d: list(self.slots[s]) for s, d in plan.copies}
        for source, destination in plan.copies:
            self.slots[destination] = list(self.slots[source])
        assert all(self.slots[d] == contents for d, contents in together.items())

    def _write(self, chunk: Chunk) -> None:
        size, table = self.blocks.block_size, chunk.sequence.block_table
        hashes = self._hashes_of(chunk.sequence)
        for place in range(chunk.start, chunk.start + chunk.count):
            block = table[place // size]
            assert self.blocks.count(block) == 1, "writes to a block that others see"
            assert not self.blocks.is_named(block), "writes to a block of the index"
            self.slots[block][place % size] = hashes[place]

    def _check(self, chunk: Chunk, length: int) -> None:
        found = self._read(chunk.sequence, length)
        expected = self._hashes_of(chunk.sequence)[:length]
        assert found == expected, f"sequence {chunk.sequence.id} reads what is not its own"

    def _read(self, sequence: Sequence, length: int) -> list[int]:
        return [h for block in sequence.block_table for h in self.slots[block]][:length]  # type: ignore[misc]

    def _hashes_of(self, sequence: Sequence) -> list[int]:
        known = self._hashes.setdefault(sequence, [])
        return prefix_hashes(sequence.tokens, sequence.salt, self.version, known)
