"""What one step computes, in numbers, and what that takes, by kind."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Batch:
    """One step. rows: answers that get a token; context: tokens that they attend to, together.

    prompt: tokens of prompts computed; pairs: query-key pairs of these; read: tokens of prompts'
    beginnings that were in the cache; sampled: rows whose logits are wanted, the answers' included.
    """

    rows: int = 0
    context: float = 0.0
    prompt: int = 0
    pairs: float = 0.0
    read: float = 0.0
    sampled: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.rows + self.prompt


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step by kind."""

    products: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    communication: float = 0.0
    launches: float = 0.0
    head: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, each.name) for each in fields(self))


def prompt_batch(start: int, count: int, last: bool) -> Batch:
    """A step that computes tokens [start, start + count) of one prompt."""
    pairs = count * start + count * (count + 1) / 2
    return Batch(prompt=count, pairs=pairs, read=start, sampled=int(last))


def repeated(batch: Batch, times: float) -> Batch:
    """The same for `times` prompts in one step."""
    return Batch(
        prompt=round(batch.prompt * times), pairs=batch.pairs * times,
        read=batch.read * times, sampled=round(batch.sampled * times),
    )  # fmt: skip
