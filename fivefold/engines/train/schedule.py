"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from fivefold.core.config import OptimizerSection


def learning_rate(step: int, steps: int, config: OptimizerSection) -> float:
    """The rate of update number `step` (from 0) of `steps`.

    Linear warm-up over `warmup` updates, then: `cosine` or `linear` down to `final_lr * lr` at the
    last update; `wsd` stays at the peak and comes down linearly over the last `decay` share (Hu et
    al. 2024); `constant` stays.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    floor = config.final_lr
    done = _share(step, config.warmup, steps - 1)
    match config.schedule:
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            height = 1 - done
        case "wsd":
            first = steps - 1 - math.ceil(config.decay * steps)
            height = 1 - _share(step, max(first, config.warmup), steps - 1)
        case "constant":
            return config.lr
    return config.lr * (floor + (1 - floor) * height)


def _share(step: int, first: int, last: int) -> float:
    """How far `step` is between `first` and `last`, within 0 and 1."""
    return min(max((step - first) / max(last - first, 1), 0.0), 1.0)
