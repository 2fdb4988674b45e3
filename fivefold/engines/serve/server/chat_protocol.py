"""What a chat may say: messages, tools, and how the answer is to be sampled."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from fivefold.engines.serve.server.api_errors import APIError, unsupported
from fivefold.engines.serve.server.forms import answer_form, calls_form
from fivefold.engines.serve.server.parsers.tool_calls import CallFormat
from fivefold.engines.serve.server.protocol import Body, SamplingFields, one_of
from fivefold.engines.serve.structured.form import StructuredOutputs

JsonObject = dict[str, JsonValue]
TEMPLATE_OWN = {"messages", "tools", "add_generation_prompt", "documents"}


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Body):
    """What a tool call calls."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart] | None, one_of("a string or a list of text parts (no images, audio)")
    ] = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "the message has no content")
        if self.tool_calls is not None and self.role != "assistant":
            raise PydanticCustomError("calls", "only the assistant has tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: content as one text, arguments as an object."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        found["content"] = self._text()
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.tool_calls:
            found["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return found

    def _text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal or "" for part in self.content)
        return self.content or ""


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    """Something that the model may use."""

    type: Literal["function"]
    function: Function


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | JsonObject | None,
        one_of("none, auto, required or a named tool"),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    prompt_cache_key: str | None = None
    """Prefixes are found without it."""
    safety_identifier: str | None = None
    """A label; it changes nothing."""
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    audio: JsonValue = None
    function_call: JsonValue = None
    functions: JsonValue = None
    metadata: JsonValue = None
    modalities: JsonValue = None
    moderation: JsonValue = None
    prediction: JsonValue = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: JsonValue = None
    service_tier: JsonValue = None
    store: JsonValue = None
    verbosity: JsonValue = None
    web_search_options: JsonValue = None

    @property
    def uses_tools(self) -> bool:
        """Whether the model is told of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def check_tools(self) -> None:
        """Raise APIError for a choice among no tools."""
        if self.tool_choice not in (None, "none") and not self.tools:
            raise APIError(400, "tool_choice needs tools", param="tool_choice")

    def call_form(self, format: CallFormat) -> StructuredOutputs | None:
        """The form of the answer where it must be, or may be, a call of a tool.

        Raises APIError for a choice of no tool, and where the request asks for another form too.
        """
        if not self.uses_tools:
            return None
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools or ()]
        several = self.parallel_tool_calls is not False
        calls = calls_form(format, functions, self.tool_choice, several)
        if calls and answer_form(self.response_format, self.structured_outputs):
            raise APIError(
                400, "an answer cannot be a call and of another form; use tool_choice=none",
                param="tool_choice",
            )  # fmt: skip
        return calls

    def limit(self) -> int | None:
        """Tokens to produce at most, as far as the request says."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise APIError(
                400, "max_tokens and max_completion_tokens are one thing; give one",
                param="max_tokens",
            )  # fmt: skip
        return self.max_completion_tokens or self.max_tokens

    def reported(self) -> int | None:
        """Likeliest tokens to report beside each. Raises APIError for a half of the question."""
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_variables(self, template: str) -> dict[str, Any]:
        """What the chat template is given beside the messages."""
        given: dict[str, Any] = dict(self.chat_template_kwargs or {})
        for name in TEMPLATE_OWN & given.keys():
            raise APIError(
                400, f"chat_template_kwargs must not set {name}", param="chat_template_kwargs"
            )
        if self.reasoning_effort is not None:
            if "reasoning_effort" not in template:
                raise unsupported("reasoning_effort", "the model's chat template knows no such")
            given["reasoning_effort"] = self.reasoning_effort
        if self.uses_tools and self.tools is not None:
            given["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if self.add_generation_prompt is not None:
            given["add_generation_prompt"] = self.add_generation_prompt
        return given


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (json.JSONDecodeError, RecursionError):
        raise APIError(
            400, f"the arguments of tool call {call.id!r} are no JSON", param="messages"
        ) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
