"""What every peer is asked. Prompts are random token ids, fresh in each round, equal for all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

VOCABULARY = 49_152
FIRST_ID = 32  # below are SmolLM2's special tokens


@dataclass(frozen=True)
class Case:
    """`requests` at once, of `shared` + `own` tokens, each answered with `output` tokens."""

    name: str
    what: str
    requests: int
    own: int
    output: int
    shared: int = 0

    def prompts(self, seed: int) -> list[list[int]]:
        """Those of one round."""
        draw = random.Random(f"{self.name} {seed}")

        def tokens(count: int) -> list[int]:
            return [draw.randrange(FIRST_ID, VOCABULARY) for _ in range(count)]

        shared = tokens(self.shared)
        return [shared + tokens(self.own) for _ in range(self.requests)]

    @property
    def input(self) -> int:
        """Tokens of a prompt."""
        return self.shared + self.own

    def tiny(self) -> Case:
        """The same in small: whether it runs at all."""
        return replace(
            self,
            requests=min(self.requests, 3),
            own=max(4, self.own // 16),
            output=min(self.output, 4),
            shared=self.shared // 16,
        )


CASES = {
    case.name: case
    for case in (
        Case("a", "alone: 128 in, 128 out", 1, 128, 128),
        Case("b", "reading 1,024 tokens", 1, 1024, 1),
        Case("c16", "16 at once: 128 in, 128 out", 16, 128, 128),
        Case("c32", "32 at once: 128 in, 128 out", 32, 128, 128),
        Case("d", "16 sharing 512 tokens, 32 of their own, 32 out", 16, 32, 32, shared=512),
    )
}


@dataclass(frozen=True)
class Figure:
    """One number made of a case's times. `better`: which of two numbers is."""

    label: str
    case: str
    of: Callable[[Case, float, float | None], float]
    better: Callable[[float, float], float]


def _decode_rate(case: Case, seconds: float, first: float | None) -> float:
    assert first is not None
    return (case.output - 1) / max(seconds - first, 1e-9)


def _output_rate(case: Case, seconds: float, first: float | None) -> float:
    return case.requests * case.output / seconds


FIGURES = (
    Figure("a: decode tok/s", "a", _decode_rate, max),
    Figure("a: TTFT ms", "a", lambda case, seconds, first: 1000 * (first or 0.0), min),
    Figure("b: prefill tok/s", "b", lambda case, seconds, first: case.input / seconds, max),
    Figure("c16: output tok/s", "c16", _output_rate, max),
    Figure("c32: output tok/s", "c32", _output_rate, max),
    Figure("d: seconds", "d", lambda case, seconds, first: seconds, min),
)
