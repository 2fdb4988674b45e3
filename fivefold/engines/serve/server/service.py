"""What every endpoint shares: the engines, the tokenizer, who may ask, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fivefold.core.errors import PromptError, TokenizerError, nearest
from fivefold.engines.serve.server.api_errors import APIError, bad_request, unsupported
from fivefold.engines.serve.server.drain import Drain
from fivefold.engines.serve.server.keys import Keys
from fivefold.engines.serve.server.messages import Ready
from fivefold.engines.serve.server.metrics import Metrics
from fivefold.engines.serve.server.pool import EnginePool


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may take."""

    body_bytes: int = 8 << 20
    seconds: float = 600.0
    """From a request's arrival to its last token."""


@dataclass
class Service:
    """One model, served."""

    pool: EnginePool
    facts: Ready
    names: Sequence[str]
    """What clients may call the model; the first is its name in answers."""
    created: int
    """Unix seconds, for /v1/models."""
    metrics: Metrics
    keys: Keys = field(default_factory=Keys)
    limits: Limits = field(default_factory=Limits)
    drain: Drain = field(default_factory=Drain)
    tool_format: str | None = None
    reasoning_format: str | None = None

    def __post_init__(self) -> None:
        self.tokenizer = self.facts.tokenizer.open()

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest word in the vocabulary: how much text a token can stand for."""
        words = self.tokenizer.backend.get_vocab(with_added_tokens=True)
        return max((len(word.encode()) for word in words), default=1)

    def check_model(self, name: str | None) -> None:
        """Raise APIError 404 for a model that is not served."""
        if name is not None and name not in self.names:
            raise APIError(
                404, f"there is no model {name!r}; {nearest(name, self.names)}",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def encode(
        self, prompt: str | list[int], param: str, *, add_special: bool = True
    ) -> list[int]:
        """Token ids of one prompt. Raises APIError for what the model cannot take."""
        if isinstance(prompt, str):
            self._check_length(len(prompt) // self.longest_token, "at least ", param)
            prompt = await asyncio.to_thread(self._encode, prompt, param, add_special)
        if not prompt:
            if self.facts.beginning is None:
                raise APIError(
                    400,
                    f"{param} is empty, and the model has no token to begin with; give some text",
                    param=param,
                )
            prompt = [self.facts.beginning]
        wrong = next((t for t in prompt if not 0 <= t < self.facts.vocab_size), None)
        if wrong is not None:
            raise APIError(
                400,
                f"{param} has token {wrong}, but the vocabulary has {self.facts.vocab_size}",
                param=param,
            )
        self._check_length(len(prompt) + 1, "", param)
        return prompt

    async def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The conversation as the model was taught it. Raises APIError 400."""
        chat = self.tokenizer.chat
        if chat is None:
            raise unsupported("messages", "the model has no chat template; use /v1/completions")
        try:
            return await asyncio.to_thread(chat.render, messages, **variables)
        except TokenizerError as error:
            raise bad_request(error, "messages") from None

    def room(self, prompt: list[int], wanted: int | None, param: str) -> int:
        """Tokens that may be produced. Raises APIError when the context cannot hold `wanted`."""
        left = self.facts.context - len(prompt)
        if wanted is not None and wanted > left:
            raise APIError(
                400,
                f"the model's context is {self.facts.context} tokens, but the request has "
                f"{len(prompt)} in {param} and {wanted} to produce; shorten either",
                param=param,
                code="context_length_exceeded",
            )
        return left if wanted is None else wanted

    def _check_length(self, count: int, how: str, param: str) -> None:
        if count > self.facts.context:
            raise APIError(
                400,
                f"the model's context is {self.facts.context} tokens, but {param} needs "
                f"{how}{count} with one to produce; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def _encode(self, text: str, param: str, add_special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            error = PromptError("the text has half of a surrogate pair", "send whole characters")
            raise bad_request(error, param) from None
        return self.tokenizer.encode(text, add_special)
