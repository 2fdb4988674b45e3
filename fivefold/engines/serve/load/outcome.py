"""What became of one request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(slots=True)
class Outcome:
    """Times are seconds from the run's start."""

    index: int
    scheduled: float
    """When it had to be sent. Latencies count from here, so that a late client hides nothing."""
    sent: float
    ended: float
    asked_input: int | None = None
    """Tokens that the prompt was made for; None where a text was given as it is."""
    asked_output: int = 0
    first: float | None = None
    """When the first piece with a token came."""
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Seconds between pieces. A piece may hold several tokens."""
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that the server had computed before, where it says so."""
    counted_by: Literal["usage", "pieces"] = "pieces"
    finish_reason: str | None = None
    failure: str | None = None
    """The kind of failure: `status 429`, `timeout`, ...; None for an answer."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was answered."""
        return self.failure is None

    @property
    def lag(self) -> float:
        """How late the client itself was."""
        return self.sent - self.scheduled

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return None if self.first is None else self.first - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Time to the last token."""
        return None if self.last is None else self.last - self.scheduled

    def record(self) -> dict[str, Any]:
        """A line of the results: all of the above."""
        latencies = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e, "lag": self.lag}
        return {**asdict(self), **latencies}
