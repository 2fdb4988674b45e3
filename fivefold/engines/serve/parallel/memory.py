"""How many blocks of cache fit when several ranks hold parts of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fivefold.engines.serve.paged.errors import MemoryBudgetError
from fivefold.engines.serve.paged.memory import blocks_within, memory_left
from fivefold.engines.serve.paged.settings import HOST_KV_BYTES, EngineSettings
from fivefold.engines.serve.parallel.messages import Measured
from fivefold.observe.format import size as as_size


def blocks_over_ranks(
    settings: EngineSettings,
    context: int,
    device: torch.device,
    each: Sequence[int],
    measure: Callable[[], Sequence[Measured]],
) -> int:
    """Blocks for the cache. `each`: bytes of a block on every rank; `kv_bytes` is for all of them.

    Ranks share the memory of a host, and have a GPU each. Raises MemoryBudgetError when not one
    block fits.
    """
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_bytes is not None:
        # GPUs have memory of their own each: what all have together says nothing of one.
        left = memory_left(device) if device.type == "cpu" else None
        return blocks_within(settings.kv_bytes, sum(each), left)
    found = measure()
    most = settings.max_sequences * -(-context // settings.block_size)
    if device.type == "cpu":
        together = Measured(sum(m.step for m in found), found[0].total, found[0].free)
        blocks = _fitting(together, sum(each), settings.memory_share)
        most = min(most, max(1, HOST_KV_BYTES // sum(each)))
    else:
        blocks = min(
            _fitting(m, size, settings.memory_share) for m, size in zip(found, each, strict=True)
        )
    if blocks < 1:
        raise MemoryBudgetError(
            f"the model does not fit: its weights are loaded, a step takes"
            f" {as_size(max(m.step for m in found))} on a rank and a block of cache"
            f" {as_size(sum(each))} on all, but {as_size(min(m.free for m in found))} are left",
            "use more ranks, a narrower format, or fewer tokens a step (token_budget)",
        )
    return min(blocks, most)


def _fitting(measured: Measured, each: int, share: float) -> int:
    usable = measured.free - int(measured.total * (1 - share))
    return (usable - measured.step) // each
