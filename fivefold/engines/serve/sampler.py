"""From logits to tokens, for a batch of requests that may each be sampled differently.

Order of operations on a row's fp32 logits:

1. log-probabilities that are reported are taken here: the model's own distribution
2. `logit_bias`, then -inf for tokens that may not end the answer yet (`min_tokens`)
3. `repetition_penalty`, `frequency_penalty`, `presence_penalty`
4. temperature 0: the largest logit (the lowest id among equals)
5. else divide by `temperature`; `top_k`, then `top_p` over what top-k left, then `min_p`; draw

Steps 1-4 are vLLM's order; 5 is Hugging Face's (vLLM applies min-p before top-p, which
differs only where both are set).
"""

# B batch, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.core.errors import PromptError
from fivefold.engines.serve.columns import Columns
from fivefold.engines.serve.filters import draw, likeliest
from fivefold.engines.serve.logprobs import Logprob, report
from fivefold.engines.serve.penalties import Penalties
from fivefold.engines.serve.random_stream import fresh_seed, uniform
from fivefold.engines.serve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Sampled:
    """One step of a batch: [B] token ids and, for rows that ask, {token id: Logprob}."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob] | None]


class Sampler:
    """Samples a batch step by step; row i stays request i until `keep` drops rows.

    `params`, `prompts` (token ids, for the repetition penalty) and `end_tokens` (end-of-sequence
    ids, for `min_tokens`) have one meaning per row. Raises PromptError for token ids in a
    request that the vocabulary does not have.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        end_tokens: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = list(params)
        self.device = torch.device(device)
        self.steps = [0] * len(params)
        self.seeds = [fresh_seed() if p.seed is None else p.seed for p in params]
        for p in params:
            check_ids(p, vocab_size)
        self.endings = [
            torch.tensor(sorted({*end_tokens, *p.stop_token_ids}), device=self.device)
            for p in params
        ]
        self.penalties = (
            Penalties(params, prompts, vocab_size, self.device)
            if any(p.uses_history for p in params)
            else None
        )
        self._refresh()

    def _refresh(self) -> None:
        """What follows from the rows in the batch."""
        params, device = self.params, self.device
        self.columns = Columns.of(params, device)
        self.any_bias = any(p.logit_bias for p in params)
        self.any_minimum = any(p.min_tokens for p in params)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        self.params = [self.params[r] for r in rows]
        self.steps = [self.steps[r] for r in rows]
        self.seeds = [self.seeds[r] for r in rows]
        self.endings = [self.endings[r] for r in rows]
        if self.penalties is not None:
            self.penalties.keep(torch.tensor(rows, dtype=torch.long, device=self.device))
        self._refresh()

    def sample(self, logits: Tensor) -> Sampled:
        """[B,V] fp32 logits of the last position -> the next token of every row."""
        adjusted = self.adjust(logits)
        chosen = likeliest(adjusted)
        if not_numbers(adjusted, chosen).any():
            raise no_numbers_error()
        if not self.columns.all_greedy:
            drawn = draw(self.filter(adjusted), self._uniforms())
            chosen = torch.where(self.columns.greedy, chosen, drawn)
        if self.penalties is not None:
            self.penalties.record(chosen)
        self.steps = [step + 1 for step in self.steps]
        asked = [p.logprobs for p in self.params]
        return Sampled(chosen.tolist(), report(logits, chosen, asked))

    def adjust(self, logits: Tensor) -> Tensor:
        """Bias, minimum length and penalties: [B,V] -> [B,V], the input left as it is."""
        if self.any_bias or self.any_minimum:
            logits = logits.clone()
            for row, (p, step, ending) in enumerate(
                zip(self.params, self.steps, self.endings, strict=True)
            ):
                for token, bias in p.logit_bias.items():
                    logits[row, token] += bias
                if step < p.min_tokens:
                    logits[row, ending] = float("-inf")
        return logits if self.penalties is None else self.penalties.apply(logits)

    def filter(self, logits: Tensor) -> Tensor:
        """Temperature and truncation: [B,V] -> [B,V] with -inf for what may not be drawn."""
        return self.columns.filter(logits)

    def _uniforms(self) -> Tensor:
        numbers = [uniform(s, n) for s, n in zip(self.seeds, self.steps, strict=True)]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)


def not_numbers(logits: Tensor, largest: Tensor) -> Tensor:
    """[B,V] and the argmax [B] -> [B] bool, rows of which something is NaN.

    NaN is the largest value to argmax.
    """
    return logits.gather(-1, largest[:, None])[:, 0].isnan()


def no_numbers_error() -> PromptError:
    """What to tell of such a row."""
    return PromptError(
        "the model's logits are not numbers (NaN)",
        "its weights are damaged or overflow in this format: try --dtype fp32",
    )


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise PromptError for token ids in a request that the vocabulary does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if token >= vocab_size:
                raise PromptError(
                    f"{name} names token {token}, but the vocabulary has {vocab_size}",
                    f"use ids below {vocab_size}",
                )
