"""How one request is sampled. Names and meanings are vLLM's; `max_new_tokens` is Hugging Face's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fivefold.core.errors import PromptError
from fivefold.engines.serve.structured.form import StructuredOutputs

MAX_LOGPROBS = 64
MAX_ANSWERS = 128
BIAS_LIMIT = 100.0
SEED_LIMIT = 1 << 64


@dataclass(frozen=True)
class SamplingParams:
    """Immutable, validated settings of one request. A wrong value raises PromptError.

    Order in which they act on the raw fp32 logits (see `sampler.py`): logit_bias, the masks of
    min_tokens and structured_outputs, repetition_penalty, frequency_penalty, presence_penalty, temperature,
    top_k, top_p, min_p.
    """

    max_new_tokens: int = 128
    """Tokens to produce at most; the model's context may end the answer earlier."""
    min_tokens: int = 0
    """Neither end-of-sequence nor stop tokens may be chosen, nor stop strings begin, before this."""
    temperature: float = 0.0
    """0 takes the most likely token; 1 samples the model's own distribution."""
    top_k: int = 0
    """Sample among the k most likely tokens (those tied with the k-th as well); 0 or -1: all."""
    top_p: float = 1.0
    """Sample among the smallest set of likely tokens whose mass reaches this (Holtzman 2020)."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's (Nguyen 2024)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of prompt and output tokens (Keskar 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output so far (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output so far (OpenAI)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, each within [-100, 100]."""
    stop: str | Sequence[str] = ()
    """Strings that end the answer; they are cut from the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (they stay in the token ids)."""
    seed: int | None = None
    """Same seed, prompt and model: same answer, whatever the batch. None: drawn afresh."""
    logprobs: int | None = None
    """Report each chosen token's log-probability under the model, and those of the n likeliest."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; the whole prompt is computed then."""
    n: int = 1
    """Answers to give. Answer i draws with seed + i."""
    best_of: int | None = None
    """Answers to produce, of which the `n` of the highest mean log-probability are given."""

    structured_outputs: StructuredOutputs | None = None
    """The form that the answer must have: see docs/engines/structured.md."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        _check_lengths(self)
        _check_distribution(self)
        _check_penalties(self)
        _check_stops(self)
        if self.structured_outputs is not None:
            _check_form(self)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken."""
        return self.temperature == 0

    @property
    def candidates(self) -> int:
        """Answers to produce."""
        return self.n if self.best_of is None else self.best_of

    @property
    def reported(self) -> int | None:
        """As `logprobs`, but 0 where ranking needs the chosen tokens' own."""
        return 0 if self.logprobs is None and self.candidates > self.n else self.logprobs

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return tuple(self.stop)

    @property
    def uses_history(self) -> bool:
        """True when earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _check_lengths(params: SamplingParams) -> None:
    _integer("max_new_tokens", params.max_new_tokens, 1, None)
    _integer("min_tokens", params.min_tokens, 0, None)
    if params.min_tokens > params.max_new_tokens:
        raise PromptError(
            f"min_tokens={params.min_tokens} is more than max_new_tokens={params.max_new_tokens}",
            "lower the one or raise the other",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _integer(name, getattr(params, name), 0, MAX_LOGPROBS)
    _integer("n", params.n, 1, MAX_ANSWERS)
    if params.best_of is not None:
        _integer("best_of", params.best_of, params.n, MAX_ANSWERS)
    if params.seed is not None:
        _integer("seed", params.seed, 0, SEED_LIMIT - 1)


def _check_distribution(params: SamplingParams) -> None:
    _number("temperature", params.temperature, 0, None)
    _integer("top_k", params.top_k, -1, None)
    _number("top_p", params.top_p, 0, 1)
    if params.top_p == 0:
        raise PromptError("top_p=0 leaves no token", "use temperature=0 for the most likely one")
    _number("min_p", params.min_p, 0, 1)


def _check_penalties(params: SamplingParams) -> None:
    _number("repetition_penalty", params.repetition_penalty, 0, None)
    if params.repetition_penalty == 0:
        raise PromptError("repetition_penalty=0 divides by zero", "1 leaves the logits as they are")
    _number("presence_penalty", params.presence_penalty, -2, 2)
    _number("frequency_penalty", params.frequency_penalty, -2, 2)
    if not isinstance(params.logit_bias, Mapping):
        raise PromptError(
            f"logit_bias={params.logit_bias!r} is no mapping", "write {token_id: bias}"
        )
    for token, bias in params.logit_bias.items():
        _integer("a logit_bias token id", token, 0, None)
        _number(f"logit_bias[{token}]", bias, -BIAS_LIMIT, BIAS_LIMIT)


def _check_stops(params: SamplingParams) -> None:
    for text in params.stop:
        if not isinstance(text, str):
            raise PromptError(f"stop string {text!r} is no text", "quote it")
        if not text:
            raise PromptError("an empty stop string would stop at once", "leave it out")
    for token in params.stop_token_ids:
        _integer("a stop_token_ids entry", token, 0, None)


def _check_form(params: SamplingParams) -> None:
    if not isinstance(params.structured_outputs, StructuredOutputs):
        raise PromptError(
            f"structured_outputs={params.structured_outputs!r} is no StructuredOutputs",
            "write StructuredOutputs(json=...)",
        )
    for name in ("min_tokens", "ignore_eos"):
        if getattr(params, name):
            raise PromptError(
                f"{name} goes on past the end of an answer whose form is complete",
                f"leave out {name} or structured_outputs",
            )


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence | set | frozenset):
        raise PromptError(f"{name}={value!r} is no list", f"write {name}=[...]")
    return tuple(value)


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PromptError(f"{name}={value!r} is no whole number", _range(name, low, high))
    if value < low or (high is not None and value > high):
        raise PromptError(f"{name}={value} is out of range", _range(name, low, high))


def _number(name: str, value: Any, low: float, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PromptError(f"{name}={value!r} is no number", _range(name, low, high))
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        raise PromptError(f"{name}={value} is out of range", _range(name, low, high))


def _range(name: str, low: float, high: float | None) -> str:
    upper = f"at least {low}" if high is None else f"between {low} and {high}"
    return f"{name} must be {upper}"
