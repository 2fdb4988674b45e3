"""What the server and an engine's process say to each other: plain records, pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import tokenizers

from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.logprobs import Logprob
from fivefold.engines.serve.paged.state import EngineState
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.text.tokenizer import Tokenizer

Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine's process serves, and how. `settings` are those of EngineSettings.

    `layout`: of one engine; others than one rank are processes that it starts.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    deterministic: bool = False
    threads: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""
    replica: int = 0
    """Its place among equal engines, which share the machine's GPUs out."""
    silence_seconds: float = 300.0
    """After so long without a word, while requests wait for one, it is taken to hang."""


@dataclass(frozen=True, slots=True)
class TokenizerRecord:
    """A tokenizer, ready to travel."""

    pipeline: str
    special_tokens: dict[str, str]
    stop_ids: tuple[int, ...]
    chat_template: str | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        """All that decides how text and chats become ids."""
        template = None if tokenizer.chat is None else tokenizer.chat.source
        return cls(
            tokenizer.backend.to_str(), tokenizer.special_tokens, tokenizer.eos_ids, template
        )

    def open(self) -> Tokenizer:
        """The same tokenizer."""
        return Tokenizer(
            tokenizers.Tokenizer.from_str(self.pipeline),
            special_tokens=self.special_tokens,
            stop_ids=self.stop_ids,
            chat_template=self.chat_template,
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """The first reply: the model is loaded."""

    tokenizer: TokenizerRecord
    context: int
    """Tokens of prompt and answer at most: what the model was made for, and the cache can hold."""
    beginning: int | None
    """The token that stands for an empty prompt, where the model has one."""
    vocab_size: int
    hidden_size: int
    parameters: int
    dtype: str
    device: str
    block_size: int
    blocks: int
    max_sequences: int
    seconds: float
    """From the process's first line to here."""
    state: EngineState


@dataclass(frozen=True, slots=True)
class Failed:
    """The first reply of a process that cannot serve: its last words."""

    message: str
    mend: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer this prompt. `id` is the server's own."""

    id: int
    prompt: list[int]
    params: SamplingParams
    priority: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this request any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Embed:
    """Pool the hidden states of this prompt."""

    id: int
    prompt: list[int]
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


Command = Submit | Abort | Embed | Stop


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request waits or runs."""

    id: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request does not run: `full` when it may come again, `failed` when it is not at fault."""

    id: int
    kind: Literal["prompt", "full", "failed"]
    message: str
    mend: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """A piece of one answer (see `completion.Delta`)."""

    id: int
    index: int
    text: str
    token_id: int
    logprobs: dict[int, Logprob] | None
    completion: Completion | None


@dataclass(frozen=True, slots=True)
class Updates:
    """What one step gave."""

    updates: list[Update]
    state: EngineState


@dataclass(frozen=True, slots=True)
class Embedded:
    """The pooled states, [D]."""

    id: int
    vector: list[float]


Reply = Ready | Failed | Accepted | Refused | Updates | Embedded
