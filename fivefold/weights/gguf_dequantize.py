"""Quantized blocks of a GGUF tensor to numbers, a cache-sized part at a time."""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from fivefold.core.errors import WeightsError
from fivefold.weights.gguf_header import Stored
from fivefold.weights.mapped_file import MappedFile

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
QUANTIZED = {
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
}
# Values dequantized at one time, whole blocks of every type. Their temporaries stay in the cache,
# and below 32,768 torch copies in this thread: to wake others costs more than so small a copy.
_PART = 127 * 256


def read_stored(file: MappedFile, stored: Stored, dtype: torch.dtype | None) -> Tensor:
    """A tensor's values in `dtype` (None: as stored; fp32 for quantized ones), on the CPU.

    Plain values in the stored dtype are a private mapping of the file. Raises WeightsError for a
    type that is not covered.
    """
    if stored.type in PLAIN:
        mapped = file.tensor(stored.start, stored.shape, PLAIN[stored.type])
        if dtype is None or dtype == mapped.dtype:
            return mapped
        values = mapped.to(dtype)
    elif stored.type in QUANTIZED:
        values = _dequantized(file, stored, dtype or torch.float32)
    else:
        known = ", ".join(kind.name for kind in (*PLAIN, *sorted(QUANTIZED)))
        raise WeightsError(
            f"{stored.name} in {file.path} is of type {stored.type.name}, which is not read",
            f"use a file with types among {known}",
        )
    file.release(stored.start, stored.end - stored.start)
    return values


def _dequantized(file: MappedFile, stored: Stored, dtype: torch.dtype) -> Tensor:
    block, block_bytes = GGML_QUANT_SIZES[stored.type]
    values = torch.empty(stored.shape, dtype=dtype)
    flat = values.view(-1)
    step = _PART // block
    for first in range(0, flat.numel() // block, step):
        count = min(step, flat.numel() // block - first)
        blocks = np.frombuffer(
            file.bytes, np.uint8, count * block_bytes, stored.start + first * block_bytes
        )
        # One row of many blocks: `dequantize` walks over rows.
        part = dequantize(blocks.reshape(1, -1), stored.type)
        flat[first * block : (first + count) * block] = torch.from_numpy(part).view(-1)
    return values
