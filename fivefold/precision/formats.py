"""Names of number formats in configurations, and torch's."""

from __future__ import annotations

import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
