"""The one dispatch rule: which implementation of an operator runs where."""

from __future__ import annotations

import torch


def _native_on_cpu() -> frozenset[torch.dtype]:
    """The low formats that this CPU has matrix instructions for and torch uses."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, native in supported.items() if native)


# Asked once: the answer is the machine's, and torch.compile then sees a constant.
NATIVE_ON_CPU = _native_on_cpu()


def low_precision_gemm_is_native(device: str, dtype: torch.dtype) -> bool:
    """Whether `device` multiplies matrices of `dtype` at no less than its fp32 rate."""
    low = dtype == torch.bfloat16 or dtype == torch.float16
    return device != "cpu" or not low or dtype in NATIVE_ON_CPU
