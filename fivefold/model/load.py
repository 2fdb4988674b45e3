"""How many tokens each expert of a layer was given."""

from __future__ import annotations

# X experts
import math
from dataclasses import dataclass

import torch
from torch import Tensor


def in_backward() -> bool:
    """Whether this is a forward pass that backward runs again: what it sees was seen before."""
    return torch._C._current_graph_task_id() != -1


class LoadCounter:
    """Tokens of each expert [X] and dropped choices, int64 [X+1], over the passes since `reset`.

    Passes without gradients do not count, nor does recomputation.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._counts: Tensor | None = None

    def add(self, counts: Tensor, dropped: Tensor | None) -> None:
        """Count one pass: `counts` [X] chose an expert, `dropped` (a scalar) of them in vain."""
        if in_backward():
            return
        last = counts.new_zeros(()) if dropped is None else dropped
        row = torch.cat((counts, last.view(1)))
        self._counts = row if self._counts is None else self._counts + row

    def total(self, device: torch.device) -> Tensor:
        """[X+1] on `device`."""
        if self._counts is None:
            return torch.zeros(self._experts + 1, dtype=torch.int64, device=device)
        return self._counts

    def reset(self) -> None:
        """Start from nothing."""
        self._counts = None


@dataclass(frozen=True)
class LayerLoad:
    """One layer in one step, over all ranks."""

    tokens: tuple[int, ...]  # that chose each expert, dropped ones too
    dropped: int

    @property
    def max_over_mean(self) -> float:
        """1 when load is even; the number of experts when one is given everything."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 0.0

    @property
    def entropy(self) -> float:
        """Of the distribution over experts, as a share of the even one's: 1 is even, 0 is one."""
        total = sum(self.tokens)
        shares = [count / total for count in self.tokens if count] if total else []
        most = math.log(len(self.tokens)) if len(self.tokens) > 1 else 1.0
        return -sum(share * math.log(share) for share in shares) / most

    def as_dict(self) -> dict[str, object]:
        """For metrics."""
        return {
            "tokens": list(self.tokens),
            "max_over_mean": self.max_over_mean,
            "dropped": self.dropped,
            "entropy": self.entropy,
        }
