"""What a request gives back: pieces while it runs, and the whole at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fivefold.engines.serve.logprobs import Logprob

FinishReason = Literal["stop", "length", "abort", "error"]
NO_TOKEN = -1
"""Stands for the token of a delta that ends an answer without one (abort, error)."""


@dataclass(frozen=True)
class Timings:
    """Seconds from the moment the request was taken, or its batch started."""

    ttft_seconds: float
    """Until the first token: reading the prompt, mostly."""
    seconds: float
    """Until the last token."""
    completion_tokens: int
    queue_seconds: float = 0.0
    """Until the first step that read some of the prompt: waiting for a place."""

    @property
    def tokens_per_second(self) -> float:
        """Rate of decoding: tokens after the first, over the time after the first."""
        if self.completion_tokens < 2:
            return self.completion_tokens / self.seconds
        return (self.completion_tokens - 1) / (self.seconds - self.ttft_seconds)


@dataclass(frozen=True)
class Delta:
    """One more token of a streamed answer."""

    text: str
    """Text that is now certain; empty while a character or a stop string may be in the making."""
    token_id: int
    logprobs: dict[int, Logprob] | None
    finish_reason: FinishReason | None
    """Set with the last token."""
    timings: Timings


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    `token_ids` has all tokens that were produced, an ending end-of-sequence token included;
    `text` leaves that one and the stop string out. `logprobs` has one {token id: Logprob} a
    token, the produced one first, or is None when none were asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or the token id that ended the answer; what went wrong after an error."""
    prompt_tokens: int
    timings: Timings
    index: int = 0
    """Which of the `n` answers to its prompt."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache."""
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' log-probabilities, where those were asked for."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One a prompt token, as `logprobs`; the first has none."""


def best(completions: Sequence[Completion], count: int) -> list[Completion]:
    """The `count` of the highest mean log-probability a token, best first, numbered anew."""

    def mean(completion: Completion) -> float:
        return (completion.cumulative_logprob or 0.0) / max(1, len(completion.token_ids))

    ranked = sorted(completions, key=mean, reverse=True)[:count]
    return [replace(completion, index=place) for place, completion in enumerate(ranked)]
