"""-inf for what an answer's form rules out, and the steps of forms as tokens are chosen."""

# B rows of a step, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import PromptError
from fivefold.engines.serve.structured.grammars import load

Bound = Sequence[tuple[int, Any]]
"""Places of rows whose answers have a form, and how far each has come."""


def mask_(logits: Tensor, bound: Bound) -> None:
    """Set what the forms rule out to -inf in rows of `logits` [B,V] fp32."""
    xgrammar = load()
    mask = xgrammar.allocate_token_bitmask(*logits.shape)
    for place, matcher in bound:
        matcher.fill_next_token_bitmask(mask, place)
    places = [place for place, _ in bound]
    xgrammar.apply_token_bitmask_inplace(logits, mask.to(logits.device), indices=places)


def stuck(largest: Tensor, bound: Bound) -> list[int]:
    """Places where nothing may be chosen: the largest masked logits [B] are -inf there."""
    at = torch.isneginf(largest).tolist()
    return [place for place, _ in bound if at[place]]


def stuck_error() -> PromptError:
    """What to tell of such a row."""
    return PromptError(
        "no token of the vocabulary goes on with the form, or logit_bias rules it out",
        "allow other characters",
    )
