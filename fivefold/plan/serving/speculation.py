"""What drafting tokens gains (Leviathan et al. 2023, Fast Inference from Transformers).

With an acceptance rate a and g drafted tokens, a step of the model yields on average
(1 - a^(g+1)) / (1 - a) tokens: those accepted in a row, and one of its own. A draft that costs c
of a step of the model makes the gain (1 - a^(g+1)) / ((1 - a) (g c + 1)), as long as the model
reads g + 1 tokens a row in the time of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core.errors import PlanError

MOST_DRAFTED = 32


@dataclass(frozen=True)
class Speculation:
    """`acceptance` of a drafted token, `drafted` tokens a step, each costing `cost` of a step."""

    acceptance: float
    drafted: int = 4
    cost: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1:
            raise PlanError(f"an acceptance rate of {self.acceptance}", "give a share below 1")
        if not 1 <= self.drafted <= MOST_DRAFTED:
            raise PlanError(f"{self.drafted} drafted tokens", f"give 1 to {MOST_DRAFTED}")
        if self.cost < 0:
            raise PlanError(f"a draft that costs {self.cost}", "give a share of a step, 0 or more")

    @property
    def tokens(self) -> float:
        """Tokens that a step yields on average."""
        a = self.acceptance
        return (1 - a ** (self.drafted + 1)) / (1 - a)

    @property
    def gain(self) -> float:
        """How much faster one sequence gets, where a step is bound by reading weights."""
        return self.tokens / (self.drafted * self.cost + 1)


def best(acceptance: float, cost: float) -> Speculation | None:
    """As many drafted tokens as gain most; None where no number gains."""
    found = max(
        (Speculation(acceptance, count, cost) for count in range(1, MOST_DRAFTED + 1)),
        key=lambda each: each.gain,
    )
    return found if found.gain > 1 else None
