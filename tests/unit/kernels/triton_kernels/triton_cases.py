"""Cases of the Triton tests: the interpreter is slow, so few examples of small shapes."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from kernel_cases import assert_within, gradients, normal
from torch import Tensor

__all__ = ["FORMATS", "assert_within", "few", "gradients", "normal", "steps", "strided"]

FORMATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])

few = settings(
    deadline=None,
    derandomize=True,
    max_examples=7,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking a failure would take minutes
    suppress_health_check=[HealthCheck.too_slow],
)


def strided(x: Tensor) -> Tensor:
    """The same numbers in rows that do not lie densely, between NaNs."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def steps(dtype: torch.dtype, rounded: float) -> float:
    """`rounded` steps where the result's rounding is the error, 64 where fp32 sums are all of it."""
    return 64 if dtype == torch.float32 else rounded
