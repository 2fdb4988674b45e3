"""Repetition, frequency and presence penalties over a batch of token histories."""

# B batch, V vocabulary

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.engines.serve.sampling_params import SamplingParams


class Penalties:
    """Token histories of a batch, and their effect on its logits.

    `seen` [B,V] bool: tokens of prompt or output (repetition, as in Hugging Face);
    `counts` [B,V] fp32: times a token is in the output (frequency and presence, as in OpenAI).
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        shape = (len(params), vocab_size)
        self.seen = torch.zeros(shape, dtype=torch.bool, device=device)
        self.counts = torch.zeros(shape, dtype=torch.float32, device=device)
        for row, prompt in enumerate(prompts):
            ids = torch.tensor(prompt, dtype=torch.long, device=device)
            self.seen[row, ids[ids < vocab_size]] = True
        self.repetition = column([p.repetition_penalty for p in params], device)
        self.frequency = column([p.frequency_penalty for p in params], device)
        self.presence = column([p.presence_penalty for p in params], device)

    def apply(self, logits: Tensor) -> Tensor:
        """[B,V] -> [B,V], a new tensor."""
        return penalise(
            logits, self.seen, self.counts, self.repetition, self.frequency, self.presence
        )

    def record(self, tokens: Tensor) -> None:
        """[B] the tokens just chosen."""
        self.seen.scatter_(1, tokens[:, None], True)
        self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(self.counts[:, :1]))

    def keep(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        for name in ("seen", "counts", "repetition", "frequency", "presence"):
            setattr(self, name, getattr(self, name)[rows])


def penalise(
    logits: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """[B,V] with histories [B,V] and columns [B,1] -> [B,V], a new tensor."""
    penalised = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, penalised, logits)
    logits = logits - counts * frequency
    return logits - (counts > 0) * presence


def column(values: Sequence[float], device: torch.device) -> Tensor:
    """[B,1] fp32."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]
