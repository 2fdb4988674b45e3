"""What requests may say: OpenAI's fields, and ours with vLLM's names. Unknown ones are refused.

None means a field's default, as OpenAI's clients send it for what was not set.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from fivefold.core.errors import PromptError
from fivefold.engines.serve.sampling_params import SEED_LIMIT, SamplingParams
from fivefold.engines.serve.server.api_errors import APIError, bad_request, unsupported
from fivefold.engines.serve.server.forms import answer_form

MOST_PROMPTS = 2048
MOST_STOPS = 64
DEFAULT_MAX_TOKENS = 16
"""Of completions, as OpenAI has it. A chat may use what is left of the context."""


class Body(BaseModel):
    """A request's body: types as written, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def one_of(what: str) -> WrapValidator:
    """In place of an error for each member of a union, one that says what may be there."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("one_of", "must be {what}", {"what": what}) from None

    return WrapValidator(validate)


def _token_ids(bias: dict[str, float] | None) -> dict[str, float] | None:
    for token in bias or ():
        if not (token.isascii() and token.isdigit()):
            raise PydanticCustomError(
                "token_id", "has key {token}, but keys must be token ids", {"token": repr(token)}
            )
    return bias


TokenIds = Annotated[list[int], Field(min_length=1, max_length=1 << 20)]
Stop = Annotated[
    str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None,
    one_of(f"a string or a list of at most {MOST_STOPS} strings"),
]
Prompts = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)],
    one_of(f"a string, a list of token ids, or a list of at most {MOST_PROMPTS} of either"),
]


class StreamOptions(Body):
    """How an answer is streamed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Body):
    """Fields that completions and chats share."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_token_ids)] = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=SEED_LIMIT)] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """A label; it changes nothing."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    """Lower runs first."""
    response_format: JsonValue = None
    structured_outputs: dict[str, JsonValue] | None = None
    """The form of the answer, with vLLM's names: json, regex, choice, grammar, ..."""
    cache_salt: str | None = None
    """Prefixes are shared between requests of the same salt alone."""

    @property
    def answers(self) -> int:
        """How many are wanted a prompt."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Raise APIError for what goes with streams alone, or not with them."""
        options = self.stream_options
        if options is not None and not self.stream:
            raise APIError(400, "stream_options needs stream=true", param="stream_options")
        if options is not None and options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "streams are not padded")
        if self.stream and self.prompt_logprobs is not None:
            raise APIError(
                400, "prompt_logprobs does not go with stream=true", param="prompt_logprobs"
            )

    def sampling(self, max_tokens: int, logprobs: int | None, **more: Any) -> SamplingParams:
        """What the engine is told. Raises APIError for values that do not go together."""
        same = (
            "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "stop",
            "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos",
            "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        form = answer_form(self.response_format, self.structured_outputs)
        given = {"temperature": 1.0, "structured_outputs": form, **given, **more}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.seed is not None:
            given["seed"] = self.seed % SEED_LIMIT
        try:
            return SamplingParams(max_new_tokens=max_tokens, logprobs=logprobs, **given)
        except PromptError as error:
            told = PromptError(
                error.message.replace("max_new_tokens", "max_tokens"),
                error.mend.replace("max_new_tokens", "max_tokens"),
            )
            raise bad_request(told) from None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    suffix: str | None = None

    def texts_or_ids(self) -> list[str] | list[list[int]]:
        """The prompts, one by one."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [prompt]
        return prompt
