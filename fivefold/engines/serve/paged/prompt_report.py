"""Log-probabilities of prompt tokens, which come by chunks and may come again."""

from __future__ import annotations

# C rows of a chunk, V vocabulary
from collections.abc import Iterable

import torch
from torch import Tensor

from fivefold.engines.serve.logprobs import Logprob, report


class PromptReport:
    """What `prompt_logprobs` asks for, filled chunk by chunk. The first token has none."""

    def __init__(self, prompt: list[int], likeliest: int) -> None:
        self._prompt = prompt
        self._likeliest = likeliest
        self.found: list[dict[int, Logprob] | None] = [None] * len(prompt)
        self._known = 1  # leading tokens that are done

    @property
    def is_done(self) -> bool:
        """Whether all tokens of the prompt are reported."""
        return self._known >= len(self._prompt)

    def take(self, start: int, pieces: Iterable[Tensor]) -> None:
        """Logits [C,V] of the tokens from `start` on: each is of the token after it."""
        for logits in pieces:
            nexts = self._prompt[start + 1 : start + 1 + logits.shape[0]]
            chosen = torch.tensor(nexts, dtype=torch.int64, device=logits.device)
            rows = report(logits[: len(nexts)], chosen, [self._likeliest] * len(nexts))
            self.found[start + 1 : start + 1 + len(nexts)] = rows
            start += logits.shape[0]
            self._known = max(self._known, min(start + 1, len(self._prompt)))
