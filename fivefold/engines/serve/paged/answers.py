"""What the engine knows of a request beside the scheduler: its answers and what is asked of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fivefold.engines.serve.completion import Completion, Delta, FinishReason
from fivefold.engines.serve.logprobs import Logprob
from fivefold.engines.serve.paged.prompt_report import PromptReport
from fivefold.engines.serve.request import Request
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of one answer of a request."""

    request: int
    index: int
    """Which of the request's answers."""
    delta: Delta
    completion: Completion | None
    """The whole answer, with its last piece."""


@dataclass(slots=True, eq=False)
class Group:
    """One request and its answers that have not ended. All but the first fork from the first."""

    id: int
    params: SamplingParams
    started: float
    cached_tokens: int = 0
    answers: list[Answer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Answer:
    """One sequence on its way to an answer."""

    group: Group
    index: int
    request: Request
    sequence: Sequence
    report: PromptReport | None = None

    @property
    def must_fork(self) -> bool:
        """Whether the token that comes is the first of several answers."""
        several = self.group.params.candidates > 1
        return several and self.index == 0 and not self.request.token_ids

    @property
    def is_unscheduled(self) -> bool:
        """Whether its sequence has yet to fork from the first."""
        return self.sequence.arrival < 0

    def begin(self) -> None:
        """Some of its prompt is about to be read; what counts is the first time."""
        if not self.request.queue_seconds:
            self.request.queue_seconds = self._elapsed()

    def accept(self, token: int, logprobs: dict[int, Logprob] | None) -> Output:
        """The next token."""
        return self._output(self.request.accept(token, logprobs, self._elapsed()))

    def end(self, reason: FinishReason, why: str | None) -> Output:
        """No more tokens come, for this reason."""
        return self._output(self.request.end(reason, why, self._elapsed()))

    def _elapsed(self) -> float:
        return time.perf_counter() - self.group.started

    def _output(self, delta: Delta) -> Output:
        ended = self.request.finish_reason is not None
        completion = (
            self.request.completion(self.index, self.group.cached_tokens) if ended else None
        )
        return Output(self.group.id, self.index, delta, completion)
