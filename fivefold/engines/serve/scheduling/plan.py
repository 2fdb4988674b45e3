"""What one step computes: a record that the runner reads and never changes."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.engines.serve.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence.

    `samples` says that the logits of the last of them are wanted.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first `copies`, then `chunks`, single tokens of running sequences in front.

    `copies` are (source, destination) blocks. A source may be the destination of a *later* copy:
    go in order, or read all sources before any is written. No destination comes twice.
    `preempted` are the sequences that lost their blocks to make room.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def token_count(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.count for chunk in self.chunks)
