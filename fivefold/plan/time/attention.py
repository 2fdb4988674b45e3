"""Seconds of attention's core: scores, their softmax, and the values they weigh."""

from __future__ import annotations

# n tokens, H heads here, S sequence, A keys that a token attends to on average, E head_dim, G value dim
from fivefold.observe.flops import attended_keys
from fivefold.plan.memory.place import Place
from fivefold.plan.time.rates import Rates

BACKWARD = 2.5  # of fused attention: five products where forward has two (Dao et al. 2022)


def core(place: Place, rates: Rates, window: int | None) -> tuple[float, float, int]:
    """Seconds forward and backward, and kernels forward."""
    if place.software.fused_attention:
        forward = fused(place, rates, window)
        return forward, BACKWARD * forward, 1
    return (*_whole(place, rates), 5)


def fused(place: Place, rates: Rates, window: int | None) -> float:
    """2 n H A (E + G) operations: of causal scores only those that count."""
    config = place.shape.config
    keys = attended_keys(place.sequence, window)
    flops = 2.0 * place.inside * place.heads * keys * (config.head_dim + config.value_dim)
    return max(flops / rates.attention, rates.launch)


def _whole(place: Place, rates: Rates) -> tuple[float, float]:
    """With all n H S scores in memory, masked ones too, as Megatron-LM has it before FlashAttention.

    Forward: a product writes scores (e bytes each), softmax reads and writes, dropout reads, writes
    and keeps a mask, a product reads. Backward: two products (one reads, one writes), dropout and
    softmax (reads two, writes one), two products that read.
    """
    config, element = place.shape.config, place.element
    scores = place.inside * place.heads * float(place.sequence)
    one = scores * element
    score = 2.0 * scores * config.head_dim
    value = 2.0 * scores * config.value_dim
    dropped = 2 * one + scores if place.software.dropout else 0.0
    forward = (
        rates.scores(score, one) + rates.pass_over(2 * one) + rates.scores(value, one)
        + (rates.pass_over(dropped) if dropped else 0.0)
    )  # fmt: skip
    backward = (
        2 * rates.scores(value, one) + 2 * rates.scores(score, one) + rates.pass_over(3 * one)
        + (rates.pass_over(dropped) if dropped else 0.0)
    )  # fmt: skip
    return forward, backward
