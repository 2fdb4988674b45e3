"""Where a model runs and in which number format, from what a user says."""

from __future__ import annotations

import torch

from fivefold.core.errors import ConfigError, nearest
from fivefold.kernels.dispatch import low_precision_gemm_is_native

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTO = "auto"


def find_device(name: str = AUTO) -> torch.device:
    """`auto`: a GPU where there is one. Raises ConfigError for a device that is not here."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == AUTO else name
    try:
        return torch.empty(0, device=chosen).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"no device {name!r}: {str(error).splitlines()[0]}", "try --device cpu"
        ) from None


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bf16 where the device multiplies it at no less than its fp32 rate, else fp32."""
    if name == AUTO:
        native = low_precision_gemm_is_native(device.type, torch.bfloat16)
        return torch.bfloat16 if native else torch.float32
    if name not in FORMATS:
        raise ConfigError(f"no number format {name!r}", nearest(name, [*FORMATS, AUTO]))
    return FORMATS[name]
