"""The settings of a batch as columns: what temperature and truncation need, a number a row."""

# B batch, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.engines.serve.filters import min_p_threshold, top_k_threshold, top_p_threshold
from fivefold.engines.serve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Columns:
    """[B] tensors; greedy rows have the settings that change nothing."""

    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Columns:
        """One row for each of `params`."""
        top_k = [0 if p.greedy else max(p.top_k, 0) for p in params]
        top_p = [1.0 if p.greedy else p.top_p for p in params]
        min_p = [0.0 if p.greedy else p.min_p for p in params]
        return cls(
            greedy=torch.tensor([p.greedy for p in params], device=device),
            temperature=torch.tensor([p.temperature or 1.0 for p in params], device=device),
            top_k=torch.tensor(top_k, device=device),
            top_p=torch.tensor(top_p, device=device),
            min_p=torch.tensor(min_p, device=device),
            all_greedy=all(p.greedy for p in params),
            any_top_k=any(top_k),
            any_top_p=any(p < 1 for p in top_p),
            any_min_p=any(min_p),
        )

    def filter(self, logits: Tensor) -> Tensor:
        """Temperature and truncation: [B,V] -> [B,V] with -inf for what may not be drawn."""
        logits = logits / self.temperature[:, None]
        if self.any_top_k:
            threshold = top_k_threshold(logits, self.top_k)
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        if self.any_top_p:
            threshold = top_p_threshold(logits, self.top_p)
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        if self.any_min_p:
            threshold = min_p_threshold(logits, self.min_p)
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        return logits
