"""What an engine may use: sequences at once, tokens a step, memory for keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from fivefold.engines.serve.paged.cache import bytes_per_block
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.engines.serve.paged.lowered import (
    LoweredDecoder,
    WeightFormat,
    why_no_native_step,
)
from fivefold.engines.serve.paged.memory import (
    blocks_that_fit,
    blocks_within,
    memory_left,
    profile_peak,
)
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder

KV_FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HOST_KV_BYTES = 4 * 2**30
"""Most memory for keys and values on a CPU, which others use as well, unless `kv_bytes` says more."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Immutable and checked: a wrong value raises EngineError."""

    max_sequences: int = 64
    """Sequences that run at once."""
    token_budget: int = 512
    """Tokens a step computes: long prompts are read in chunks between others' tokens."""
    queue_limit: int = 1024
    """Requests that may wait."""
    block_size: int = 32
    """Tokens a block of the cache holds; whole blocks are shared between equal prefixes."""
    max_context: int | None = None
    """Prompt and answer together; None: what the model was made for."""
    num_blocks: int | None = None
    """Blocks of the cache; None: from `kv_bytes`, or as many as memory allows."""
    kv_bytes: int | None = None
    """Memory for keys and values; None: measured, 4 GiB at most on a CPU."""
    memory_share: float = 0.9
    """Part of all memory that may be in use in the end."""
    kv_dtype: torch.dtype | None = None
    """Format of keys and values; None: the model's."""
    weights: WeightFormat = "own"
    """int8: matrices rounded to 8 bits, a scale an output, where a native step runs them."""
    prefix_cache: bool = True
    """Whether requests with the same beginning share what was computed for it."""

    def __post_init__(self) -> None:
        for name in ("max_sequences", "token_budget", "queue_limit", "block_size"):
            _positive(name, getattr(self, name))
        for name in ("max_context", "num_blocks", "kv_bytes"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if not 0 < self.memory_share <= 1:
            raise EngineError(
                f"memory_share={self.memory_share!r}", "memory_share must be above 0, at most 1"
            )
        if self.weights not in get_args(WeightFormat):
            known = " or ".join(get_args(WeightFormat))
            raise EngineError(f"weights={self.weights!r}", f"weights must be {known}")
        if self.kv_dtype is not None and self.kv_dtype not in KV_FORMATS:
            known = ", ".join(str(f).removeprefix("torch.") for f in KV_FORMATS)
            raise EngineError(f"kv_dtype={self.kv_dtype!r}", f"kv_dtype must be one of {known}")

    def context(self, config: ModelConfig) -> int:
        """Tokens of prompt and answer at most. Raises EngineError beyond what the model knows."""
        known = config.max_positions
        if self.max_context is not None and self.max_context > known:
            raise EngineError(
                f"max_context={self.max_context} is more than the model's {known} positions",
                f"use {known} at most",
            )
        return self.max_context or known

    def kv_format(self, decoder: Decoder) -> torch.dtype:
        """Format of keys and values."""
        return self.kv_dtype or decoder.head_weight().dtype

    def why_no_native_step(self, decoder: Decoder) -> str | None:
        """Why steps walk the decoder's modules; None: they need not.

        Raises EngineError where that is not possible with these settings.
        """
        why = why_no_native_step(decoder)
        if why is None and self.kv_format(decoder) != decoder.head_weight().dtype:
            why = "keys and values are in a format other than the model's"
        if why is not None and self.weights != "own":
            raise EngineError(
                f"weights={self.weights!r} takes the native step, which is not there: {why}",
                'leave weights="own"',
            )
        return why

    def blocks(self, decoder: Decoder, lowered: LoweredDecoder | None = None) -> int:
        """Blocks for the cache. Raises MemoryBudgetError when they do not fit."""
        if self.num_blocks is not None:
            return self.num_blocks
        dtype, device = self.kv_format(decoder), decoder.head_weight().device
        each = bytes_per_block(decoder.config, self.block_size, dtype)
        if self.kv_bytes is not None:
            return blocks_within(self.kv_bytes, each, memory_left(device))
        step = profile_peak(
            decoder, self.token_budget, self.max_sequences, self.block_size, lowered
        )
        fit = blocks_that_fit(decoder, step, self.block_size, dtype, self.memory_share)
        most = self.max_sequences * -(-self.context(decoder.config) // self.block_size)
        if device.type == "cpu":
            most = min(most, max(1, HOST_KV_BYTES // each))
        return min(fit, most)


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EngineError(f"{name}={value!r}", f"{name} must be a whole number of at least 1")
