"""One stream of tokens on its way through the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fivefold.engines.serve.scheduling.errors import SchedulingError

State = Literal["waiting", "running", "preempted", "finished"]
FinishReason = Literal["stop", "length", "abort", "error"]

NEXT_STATES: dict[State, tuple[State, ...]] = {
    "waiting": ("running", "finished"),
    "running": ("preempted", "finished"),
    "preempted": ("running", "finished"),
    "finished": (),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, how many of them are computed, and the blocks that hold those.

    The scheduler sets the fields below `arrival`; others only read them.
    """

    id: int
    tokens: list[int]
    """Prompt and output so far."""
    prompt_length: int
    max_tokens: int
    """Tokens to produce at most."""
    salt: bytes = b""
    """Tenant and adapter. Sequences of different salts never share a cached block."""
    priority: int = 0
    """Lower goes first; time spent waiting makes up for it."""
    match_prefix: bool = True
    """False computes the whole prompt, as logprobs of the prompt need."""

    arrival: int = -1
    order: tuple[int, int] = (0, 0)
    """Place among all sequences, fixed when added: lower runs earlier and is preempted later."""
    state: State = "waiting"
    finish: FinishReason | None = None
    computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    block_table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Names of the leading full blocks in the prefix index, as far as they were needed."""
    hit: int = 0
    """Prompt tokens that were found in the cache when it first ran."""

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def output_length(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def most_slots(self) -> int:
        """Slots of the cache that it may come to need; the last token is never fed back."""
        return self.prompt_length + self.max_tokens - 1

    def move(self, state: State) -> None:
        """Change the state. Raises SchedulingError for a change that the states do not have."""
        if state not in NEXT_STATES[self.state]:
            raise SchedulingError(
                f"sequence {self.id} is {self.state} and cannot become {state}",
                f"possible: {', '.join(NEXT_STATES[self.state]) or 'nothing'}",
            )
        self.state = state
