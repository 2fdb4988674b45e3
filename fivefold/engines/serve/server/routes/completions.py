"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fivefold.engines.serve.completion import Completion, best
from fivefold.engines.serve.logprobs import Logprob
from fivefold.engines.serve.server import unsupported
from fivefold.engines.serve.server.api_errors import JSON, APIError
from fivefold.engines.serve.server.generation import Ask, Generation, collect
from fivefold.engines.serve.server.keys import Caller
from fivefold.engines.serve.server.logprob_format import CompletionLogprobs, prompt_logprobs
from fivefold.engines.serve.server.messages import Update
from fivefold.engines.serve.server.protocol import DEFAULT_MAX_TOKENS, CompletionRequest
from fivefold.engines.serve.server.routes.access import Admitted, Served
from fivefold.engines.serve.server.service import Service
from fivefold.engines.serve.server.sse import EventStream, while_connected
from fivefold.engines.serve.server.usage import head, usage

router = APIRouter()


@router.post("/v1/completions", response_class=JSON)
async def create_completion(
    request: Request, body: CompletionRequest, service: Served, caller: Admitted
) -> Response:
    """Continue prompts."""
    service.check_model(body.model)
    check(body)
    answer = await while_connected(request.receive, Answer.start(service, body, caller))
    if body.stream:
        return EventStream(answer.events(), answer.generation.close, service.limits.seconds)
    return JSON(await while_connected(request.receive, answer.whole()))


def check(body: CompletionRequest) -> None:
    """Raise APIError for fields that do not go together."""
    unsupported.check(body.__dict__, unsupported.COMPLETION)
    body.check_stream()
    if body.best_of is not None and body.best_of < body.answers:
        raise APIError(400, "best_of must be at least n", param="best_of")
    if body.stream and body.best_of is not None and body.best_of > body.answers:
        raise APIError(400, "best_of above n does not go with stream=true", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise APIError(400, "max_tokens=0 needs echo=true: nothing else is given",
                       param="max_tokens")  # fmt: skip
    if body.stream and body.echo and (body.logprobs is not None or body.max_tokens == 0):
        raise APIError(
            400, "echo with logprobs or max_tokens=0 does not go with stream=true", param="echo"
        )


class Answer:
    """One request on its way."""

    def __init__(
        self, service: Service, body: CompletionRequest, texts: list[str], generation: Generation
    ) -> None:
        self.body = body
        self.texts = texts
        self.generation = generation
        self._tokenizer = service.tokenizer
        self._head = head("cmpl", "text_completion", service.names[0])
        self._writers: dict[int, CompletionLogprobs] = {}

    @classmethod
    async def start(cls, service: Service, body: CompletionRequest, caller: Caller) -> Answer:
        """Encode and submit. Raises APIError."""
        given = body.texts_or_ids()
        ids = [await service.encode(prompt, "prompt") for prompt in given]
        texts = [p if isinstance(p, str) else service.tokenizer.decode(p) for p in given]
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        shown = {"best_of": body.best_of}
        if body.echo and body.logprobs is not None:
            shown["prompt_logprobs"] = body.logprobs
        params = [
            body.sampling(service.room(p, wanted, "prompt"), body.logprobs, **shown) for p in ids
        ]
        ask = Ask(ids, params, caller, body.priority or 0, body.cache_salt or "")
        return cls(service, body, texts, await Generation.start(service, ask))

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        try:
            found = await collect(self.generation)
        finally:
            self.generation.close()
        choices = []
        for place, completions in enumerate(found):
            given = completions
            if self.body.best_of is not None and self.body.best_of > self.body.answers:
                given = best(completions, self.body.answers)
            choices += [self._choice(place, completion) for completion in given]
        written = 0 if self.body.max_tokens == 0 else None
        return {**self._head, "choices": choices, "usage": usage(self.generation, written)}

    def _choice(self, place: int, completion: Completion) -> dict[str, Any]:
        text, reason = completion.text, completion.finish_reason
        tokens, steps = completion.token_ids, completion.logprobs
        if self.body.max_tokens == 0:
            text, tokens, steps, reason = "", [], steps and [], "length"
        if self.body.echo:
            text = self.texts[place] + text
        choice: dict[str, Any] = {
            "index": place * self.body.answers + completion.index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
        }
        if self.body.logprobs is not None:
            before = completion.prompt_logprobs if self.body.echo else None
            read = self.generation.ask.prompts[place] if before is not None else []
            writer = CompletionLogprobs(self._tokenizer, self.body.logprobs)
            all_steps: list[dict[int, Logprob] | None] = [*(before or []), *(steps or [])]
            choice["logprobs"] = writer.write([*read, *tokens], all_steps)
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, completion.prompt_logprobs)
        return choice

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks."""
        if self.body.echo:
            for place, text in enumerate(self.texts):
                for index in range(self.body.answers):
                    yield self._chunk(place * self.body.answers + index, text)
        async for place, piece in self.generation:
            if piece.text or piece.logprobs is not None or piece.completion is not None:
                yield self._piece(place, piece)
        if self.body.with_usage:
            yield {**self._head, "choices": [], "usage": usage(self.generation)}

    def _piece(self, place: int, piece: Update) -> dict[str, Any]:
        index = place * self.body.answers + piece.index
        logprobs = None
        if self.body.logprobs is not None and piece.logprobs is not None:
            if index not in self._writers:
                self._writers[index] = CompletionLogprobs(self._tokenizer, self.body.logprobs)
            logprobs = self._writers[index].write([piece.token_id], [piece.logprobs])
        return self._chunk(index, piece.text, logprobs, piece.completion)

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        end: Completion | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if end is None else end.finish_reason,
            "stop_reason": None if end is None else end.stop_reason,
        }
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self.body.with_usage else chunk
