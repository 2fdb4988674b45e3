"""The one dispatch rule: which implementation of an operator runs where."""

from __future__ import annotations

from functools import cache

import torch


@cache
def low_precision_gemm_is_native(device: str, dtype: torch.dtype) -> bool:
    """Whether `device` multiplies matrices of `dtype` at no less than its fp32 rate."""
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()
