"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.server import unsupported
from fivefold.engines.serve.server.api_errors import JSON
from fivefold.engines.serve.server.api_errors import unsupported as refuse
from fivefold.engines.serve.server.chat_message import MessageReader, whole_message
from fivefold.engines.serve.server.chat_protocol import ChatRequest
from fivefold.engines.serve.server.generation import Ask, Generation, collect
from fivefold.engines.serve.server.keys import Caller
from fivefold.engines.serve.server.logprob_format import chat_logprobs, prompt_logprobs
from fivefold.engines.serve.server.messages import Update
from fivefold.engines.serve.server.parsers import make_parser
from fivefold.engines.serve.server.parsers.formats import CALL_FORMATS
from fivefold.engines.serve.server.routes.access import Admitted, Served
from fivefold.engines.serve.server.service import Service
from fivefold.engines.serve.server.sse import EventStream, while_connected
from fivefold.engines.serve.server.usage import head, usage

router = APIRouter()


@router.post("/v1/chat/completions", response_class=JSON)
async def create_chat_completion(
    request: Request, body: ChatRequest, service: Served, caller: Admitted
) -> Response:
    """Answer a conversation."""
    service.check_model(body.model)
    unsupported.check(body.__dict__, unsupported.CHAT)
    body.check_stream()
    body.check_tools()
    if body.uses_tools and service.tool_format is None:
        raise refuse(
            "tools", "how this model writes tool calls is not known; the server takes --tool-parser"
        )
    answer = await while_connected(request.receive, Answer.start(service, body, caller))
    if body.stream:
        return EventStream(answer.events(), answer.generation.close, service.limits.seconds)
    return JSON(await while_connected(request.receive, answer.whole()))


class Answer:
    """One request on its way."""

    def __init__(
        self, service: Service, body: ChatRequest, prompt: str, generation: Generation
    ) -> None:
        self.body = body
        self.generation = generation
        self._tokenizer = service.tokenizer
        self._name = service.names[0]
        formats = service.tool_format if body.uses_tools else None, service.reasoning_format
        self._readers = [
            MessageReader(make_parser(*formats, prompt), body.parallel_tool_calls is not False)
            for _ in range(body.answers)
        ]

    @classmethod
    async def start(cls, service: Service, body: ChatRequest, caller: Caller) -> Answer:
        """Render, encode and submit. Raises APIError."""
        chat = service.tokenizer.chat
        variables = body.template_variables("" if chat is None else chat.source)
        messages = [message.for_template() for message in body.messages]
        text = await service.render(messages, **variables)
        prompt = await service.encode(text, "messages", add_special=False)
        room = service.room(prompt, body.limit(), "messages")
        calls = None
        if service.tool_format is not None:
            calls = body.call_form(CALL_FORMATS[service.tool_format])
        bound = {} if calls is None else {"structured_outputs": calls}
        params = body.sampling(room, body.reported(), **bound)
        ask = Ask([prompt], [params], caller, body.priority or 0, body.cache_salt or "")
        return cls(service, body, text, await Generation.start(service, ask))

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        try:
            (completions,) = await collect(self.generation)
        finally:
            self.generation.close()
        answer = head("chatcmpl", "chat.completion", self._name)
        answer["choices"] = [self._choice(completion) for completion in completions]
        answer["usage"] = usage(self.generation)
        if self.body.prompt_logprobs is not None:
            found = completions[0].prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(self._tokenizer, found)
        return answer

    def _choice(self, completion: Completion) -> dict[str, Any]:
        reader = self._readers[completion.index]
        message = whole_message(reader.read(completion.text, completion))
        logprobs = None
        if completion.logprobs is not None:
            logprobs = chat_logprobs(
                self._tokenizer, completion.token_ids, completion.logprobs,
                self.body.reported() or 0,
            )  # fmt: skip
        return {
            "index": completion.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reader.reason(completion),
            "stop_reason": completion.stop_reason,
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks."""
        start = head("chatcmpl", "chat.completion.chunk", self._name)
        more = {"usage": None} if self.body.with_usage else {}
        for index in range(self.body.answers):
            delta = {"role": "assistant", "content": ""}
            yield {**start, "choices": [_choice(index, delta)], **more}
        async for _, piece in self.generation:
            for choice in self._choices(piece):
                yield {**start, "choices": [choice], **more}
        if self.body.with_usage:
            yield {**start, "choices": [], "usage": usage(self.generation)}

    def _choices(self, piece: Update) -> list[dict[str, Any]]:
        """What one piece of an answer adds, and the end after its last."""
        reader = self._readers[piece.index]
        choices = [_choice(piece.index, d) for d in reader.read(piece.text, piece.completion)]
        if piece.logprobs is not None:
            if not choices:  # text that is held back: the token is reported all the same
                choices = [_choice(piece.index, {})]
            choices[0]["logprobs"] = chat_logprobs(
                self._tokenizer, [piece.token_id], [piece.logprobs], self.body.reported() or 0
            )
        if piece.completion is not None:
            end = _choice(piece.index, {}, reader.reason(piece.completion))
            choices.append({**end, "stop_reason": piece.completion.stop_reason})
        return choices


def _choice(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
