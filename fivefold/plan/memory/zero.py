"""ZeRO's table (Rajbhandari et al. 2020, figure 1): bytes of state a rank, by stage."""

from __future__ import annotations

from fivefold.core.errors import PlanError

MIXED_PRECISION = 12  # K: fp32 masters and two moments of Adam


def zero_bytes(parameters: float, ranks: int, stage: int, kept: int = MIXED_PRECISION) -> float:
    """Of 16-bit parameters and gradients and `kept` bytes of optimizer state a parameter.

    Raises PlanError for a stage that there is not.
    """
    each: float
    match stage:
        case 0:
            each = 2 + 2 + kept
        case 1:
            each = 2 + 2 + kept / ranks
        case 2:
            each = 2 + (2 + kept) / ranks
        case 3:
            each = (2 + 2 + kept) / ranks
        case _:
            raise PlanError(f"there is no ZeRO stage {stage}", "use 0, 1, 2 or 3")
    return parameters * each
