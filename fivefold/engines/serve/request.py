"""One prompt on its way: its tokens so far, its text so far, and whether it has ended."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.engines.serve.completion import (
    NO_TOKEN,
    Completion,
    Delta,
    FinishReason,
    Timings,
)
from fivefold.engines.serve.logprobs import Logprob
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.stop import StopMatcher
from fivefold.text.detokenizer import Detokenizer
from fivefold.text.tokenizer import Tokenizer

PRIMING_TOKENS = 6
"""Prompt tokens that the detokenizer sees first, so that the answer keeps its leading space."""


class Request:
    """State of one prompt. `limit` is the tokens it may produce in the model's context.

    Without a tokenizer only token ids are produced, and stop strings never match.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        limit: int,
        end_tokens: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prompt = list(prompt)
        self.params = params
        self.limit = limit
        self.endings = {*params.stop_token_ids} | (set() if params.ignore_eos else {*end_tokens})
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.cumulative_logprob: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.queue_seconds = 0.0
        self._first_at = 0.0
        self._last_at = 0.0
        self._stop = StopMatcher(params.stops, include_stop=params.include_stop_str_in_output)
        self._text: Detokenizer | None = None
        if tokenizer is not None:
            self._text = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
            for token in self.prompt[-PRIMING_TOKENS:]:
                self._text.push(token)

    def accept(self, token: int, logprobs: dict[int, Logprob] | None, elapsed: float) -> Delta:
        """Take the next token, `elapsed` seconds after the start."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs[token].logprob
            if self.params.logprobs is not None:
                self.logprobs.append(logprobs)
        if len(self.token_ids) == 1:
            self._first_at = elapsed
        self._last_at = elapsed
        piece = self._read(token)
        self.text += piece
        return Delta(piece, token, logprobs, self.finish_reason, self.timings)

    def _read(self, token: int) -> str:
        """The certain text after this token; sets the reasons when it was the last."""
        if token in self.endings:
            self.finish_reason, self.stop_reason = "stop", token
            return self._remaining_text()
        new = self._text.push(token) if self._text is not None else ""
        early = len(self.token_ids) < self.params.min_tokens
        piece = new if early else self._stop.push(new)
        if self._stop.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._stop.stopped
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"
            piece += self._remaining_text()
        return piece

    def _remaining_text(self) -> str:
        """Bytes and beginnings of stop strings that were held back, now that nothing follows."""
        rest = self._text.finish() if self._text is not None else ""
        return self._stop.push(rest) + self._stop.finish()

    @property
    def timings(self) -> Timings:
        """Times so far."""
        return Timings(self._first_at, self._last_at, len(self.token_ids), self.queue_seconds)

    def end(self, reason: FinishReason, why: str | None, elapsed: float) -> Delta:
        """End the answer without another token; text that was held back comes with it."""
        rest = self._remaining_text()
        self.text += rest
        self.finish_reason, self.stop_reason = reason, why
        if not self.token_ids:
            self._first_at = elapsed
        self._last_at = elapsed
        return Delta(rest, NO_TOKEN, None, reason, self.timings)

    def completion(self, index: int = 0, cached_tokens: int = 0) -> Completion:
        """The whole answer, once finished."""
        assert self.finish_reason is not None
        return Completion(
            text=self.text,
            token_ids=self.token_ids,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_tokens=len(self.prompt),
            timings=self.timings,
            index=index,
            cached_tokens=cached_tokens,
            cumulative_logprob=self.cumulative_logprob,
            prompt_logprobs=self.prompt_logprobs,
        )
