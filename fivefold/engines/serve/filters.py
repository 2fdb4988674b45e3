"""Top-k, top-p and min-p as one threshold per row, and the draw from what is left.

Each filter keeps the tokens at or above a logit; the highest of the three thresholds decides.
A threshold needs only the largest logits, so the vocabulary is never sorted whole unless the
distribution is nearly flat. Tokens tied at the threshold are all kept (Hugging Face does this
for top-k; for top-p it keeps whichever its sort put last).
"""

# B batch, V vocabulary, W candidates looked at

from __future__ import annotations

import torch
from torch import Tensor

FIRST_WIDTH = 256
WIDTH_GROWTH = 8


def top_k_threshold(logits: Tensor, top_k: Tensor) -> Tensor:
    """[B,V] and [B] int64 (0: off) -> [B,1] the k-th largest logit, -inf where off."""
    vocabulary = logits.shape[-1]
    k = top_k.clamp(max=vocabulary)
    values = logits.topk(max(1, int(k.max())), dim=-1).values
    threshold = values.gather(-1, (k - 1).clamp(min=0)[:, None])
    return threshold.masked_fill((k <= 0)[:, None], float("-inf"))


def top_p_threshold(logits: Tensor, top_p: Tensor) -> Tensor:
    """[B,V] and [B] -> [B,1] the last logit of the nucleus, -inf where top_p is 1.

    A token is in the nucleus while the mass of those before it is less than top_p.
    """
    vocabulary = logits.shape[-1]
    # Not logsumexp: alone, a row's sum would be split over threads, and its bits be others.
    log_mass = (logits.amax(dim=-1) - logits.log_softmax(dim=-1).amax(dim=-1))[:, None]
    target = top_p.to(torch.float64)[:, None]
    active = target < 1
    width = min(FIRST_WIDTH, vocabulary)
    while True:
        values = logits.topk(width, dim=-1).values
        reached = (values - log_mass).to(torch.float64).exp().cumsum(dim=-1)
        if width == vocabulary or bool(((reached[:, -1:] >= target) | ~active).all()):
            break
        width = min(width * WIDTH_GROWTH, vocabulary)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    kept = (before < target).sum(dim=-1, keepdim=True).clamp(min=1)
    return values.gather(-1, kept - 1).masked_fill(~active, float("-inf"))


def min_p_threshold(logits: Tensor, min_p: Tensor) -> Tensor:
    """[B,V] and [B] -> [B,1]: p < min_p * p_max is the same as logit < logit_max + log(min_p)."""
    return logits.amax(dim=-1, keepdim=True) + min_p[:, None].log()


def likeliest(logits: Tensor) -> Tensor:
    """[B,V] fp32 or fp64 -> [B] ids of the largest logits, the lowest id among equals; NaN wins.

    On CPUs by NumPy, which compares vectors where torch's argmax goes one by one.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """[B,V] logits (-inf: excluded) and [B] fp64 in [0,1) -> [B] token ids.

    Inverts the cumulative distribution in fp64: one number a token, and a row's token depends
    on its own logits and number only. A token of probability 0 is never drawn.
    """
    cumulative = logits.softmax(dim=-1, dtype=torch.float32).to(torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # below the total even after rounding, so that the search never runs off the end
    point = torch.minimum(
        uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, point, right=True)[:, 0]
