"""From what a user gives to a request that can run: encoding, limits, refusals."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.core.errors import PromptError
from fivefold.engines.serve.request import Request
from fivefold.engines.serve.sampler import check_ids
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.model.config import ModelConfig
from fivefold.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Preparation:
    """What requests of one model have in common. `context` bounds prompt and answer together."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer | None, context: int | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.context = config.max_positions if context is None else context
        known = () if tokenizer is None else tokenizer.eos_ids
        self.end_tokens = tuple(dict.fromkeys((*config.eos_token_ids, *known)))

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A prompt ready to run. Raises PromptError for one that this model cannot take."""
        ids = self.encode(prompt)
        if len(ids) >= self.context:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but the model's context is {self.context}"
                " with at least one token to produce",
                "shorten the prompt",
            )
        if self.tokenizer is None and params.stops:
            raise PromptError("stop strings need a tokenizer", "use stop_token_ids")
        check_ids(params, self.config.vocab_size)
        limit = min(params.max_new_tokens, self.context - len(ids))
        return Request(ids, params, limit, self.end_tokens, self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids, at least one. Raises PromptError for ids that the vocabulary has not."""
        if not isinstance(prompt, str):
            ids = [int(token) for token in prompt]
        elif self.tokenizer is None:
            raise PromptError("a text prompt needs a tokenizer", "give token ids")
        else:
            ids = self.tokenizer.encode(prompt)
        wrong = next((t for t in ids if not 0 <= t < self.config.vocab_size), None)
        if wrong is not None:
            raise PromptError(
                f"the prompt has token {wrong}, but the vocabulary has {self.config.vocab_size}",
                "use the tokenizer that belongs to the model",
            )
        return ids or [self._beginning()]

    def _beginning(self) -> int:
        """What stands for an empty prompt."""
        known = None if self.tokenizer is None else self.tokenizer.bos_id
        beginning = known if known is not None else self.config.bos_token_id
        if beginning is None:
            raise PromptError(
                "the prompt is empty and the model has no beginning-of-sequence token",
                "give a prompt",
            )
        return beginning
