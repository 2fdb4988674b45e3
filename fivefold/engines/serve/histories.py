"""Which tokens each request has seen, in slots that do not move while requests come and go."""

# P rows with penalties, V vocabulary

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.engines.serve.penalties import column, penalise
from fivefold.engines.serve.sampling_params import SamplingParams

FIRST_SLOTS = 4


class Histories:
    """As `Penalties`, by request ids. Memory is taken for requests that have penalties alone."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self._free: list[int] = []
        self._slots: dict[int, int] = {}
        self._params: dict[int, SamplingParams] = {}

    def add(self, id: int, params: SamplingParams, prompt: Sequence[int]) -> None:
        """A request whose prompt has these tokens."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[id], self._params[id] = slot, params
        self._seen[slot] = False
        self._counts[slot] = 0
        self._seen[slot, torch.tensor(prompt, dtype=torch.int64, device=self.device)] = True

    def remove(self, id: int) -> None:
        """Forget a request; one without penalties was never here."""
        slot = self._slots.pop(id, None)
        if slot is not None:
            self._free.append(slot)
            del self._params[id]

    def apply(self, ids: Sequence[int], logits: Tensor) -> Tensor:
        """Penalties of these requests on their logits [P,V]: a new tensor."""
        slots, params = self._at(ids), [self._params[id] for id in ids]
        return penalise(
            logits,
            self._seen[slots],
            self._counts[slots],
            column([p.repetition_penalty for p in params], self.device),
            column([p.frequency_penalty for p in params], self.device),
            column([p.presence_penalty for p in params], self.device),
        )

    def record(self, ids: Sequence[int], tokens: Tensor) -> None:
        """[P] the tokens just chosen."""
        slots = self._at(ids)
        self._seen[slots, tokens] = True
        self._counts[slots, tokens] += 1

    def _at(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([self._slots[id] for id in ids], device=self.device)

    def _grow(self) -> None:
        """Twice the slots."""
        held = self._seen.shape[0]
        more = (0, 0, 0, max(FIRST_SLOTS, held))
        self._seen = torch.nn.functional.pad(self._seen, more)
        self._counts = torch.nn.functional.pad(self._counts, more)
        self._free.extend(range(self._seen.shape[0] - 1, held - 1, -1))
