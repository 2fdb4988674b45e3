"""How many blocks of cache fit: memory is measured with a worst step, not guessed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from fivefold.engines.serve.paged.cache import PagedCache, bytes_per_block
from fivefold.engines.serve.paged.errors import MemoryBudgetError
from fivefold.engines.serve.paged.lowered import LoweredDecoder
from fivefold.engines.serve.paged.runner import PagedRunner
from fivefold.engines.serve.scheduling.plan import Chunk, StepPlan
from fivefold.engines.serve.scheduling.sequence import Sequence
from fivefold.model.decoder import Decoder
from fivefold.observe.format import size as as_size
from fivefold.observe.memory import memory_bytes, resident_bytes

CGROUP = Path("/sys/fs/cgroup")
GROUPS = (  # limit, usage and statistics in control groups of version 2 and of version 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
        "total_inactive_file",
    ),
)  # fmt: skip
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): sets VmHWM to the present resident set


@dataclass(frozen=True)
class Footprint:
    """Bytes that a model takes at work, without its cache."""

    weights: int
    step: int
    """What the largest step takes on top, at its peak."""


def profile_peak(
    decoder: Decoder,
    tokens: int,
    sequences: int,
    block_size: int,
    lowered: LoweredDecoder | None = None,
) -> Footprint:
    """Run the largest step that a scheduler may plan, and measure.

    `tokens` in one step, over `sequences` that all sample. On CUDA the allocator's peak counts;
    elsewhere that of resident memory, which Linux is asked to reset (where it may not be, the
    largest so far counts: rather too much than too little).
    """
    weight = decoder.head_weight()
    plan, blocks = worst_plan(tokens, sequences, block_size)
    cache = PagedCache(decoder.config, blocks, block_size, weight.dtype, weight.device)
    before = reset_peak(weight.device)
    logits = PagedRunner(decoder, cache, lowered).step(plan)
    logits.log_softmax(dim=-1).argmax(dim=-1)  # as reported log-probabilities do
    peak = memory_bytes(weight.device.type)
    return Footprint(weight_bytes(decoder), max(0, peak - before))


def worst_plan(tokens: int, sequences: int, block_size: int) -> tuple[StepPlan, int]:
    """So many tokens of new sequences in one step, and the blocks that they need."""
    sequences = max(1, min(sequences, tokens))
    shares = [tokens // sequences + (i < tokens % sequences) for i in range(sequences)]
    chunks, first = [], 0
    for number, share in enumerate(shares):
        sequence = Sequence(number, [0] * share, share, 1)
        end = first + -(-share // block_size)
        sequence.block_table.extend(range(first, end))
        chunks.append(Chunk(sequence, 0, share, True))
        first = end
    return StepPlan(tuple(chunks)), first


def blocks_that_fit(
    decoder: Decoder, footprint: Footprint, block_size: int, dtype: torch.dtype, share: float
) -> int:
    """Blocks of cache that fit beside the weights, which are loaded, and the largest step.

    `share` of all memory may be used in the end. Raises MemoryBudgetError with the numbers when
    not even one block fits.
    """
    total, free = memory_left(decoder.head_weight().device)
    usable = free - int(total * (1 - share))
    each = bytes_per_block(decoder.config, block_size, dtype)
    blocks = (usable - footprint.step) // each
    if blocks < 1:
        raise MemoryBudgetError(
            f"the model does not fit: {as_size(footprint.weights)} of weights are loaded, a step"
            f" takes {as_size(footprint.step)} and a block of cache {as_size(each)}, but"
            f" {as_size(max(0, usable))} of {as_size(total)} are left",
            "use a smaller model, a narrower format, or fewer tokens a step (token_budget)",
        )
    return blocks


def blocks_within(budget: int, each: int, left: tuple[int, int] | None) -> int:
    """Blocks of `each` bytes that a budget asked for has room for.

    `left`: all memory and what is free of it, where the budget must fit in one. Raises
    MemoryBudgetError with the numbers.
    """
    if left is not None and budget > left[1]:
        raise MemoryBudgetError(
            f"kv_bytes asks for {as_size(budget)}, but {as_size(left[1])} of {as_size(left[0])}"
            " are free",
            "ask for less",
        )
    if budget < each:
        raise MemoryBudgetError(
            f"kv_bytes is {as_size(budget)}, but one block of cache takes {as_size(each)}",
            "ask for more",
        )
    return budget // each


def check_weights_fit(weights: int, device: torch.device, share: float) -> None:
    """Raise MemoryBudgetError, before weights are loaded, when they alone are too large."""
    total, free = memory_left(device)
    usable = free - int(total * (1 - share))
    if weights > usable:
        raise MemoryBudgetError(
            f"the model does not fit: its weights take {as_size(weights)}, but"
            f" {as_size(max(0, usable))} of {as_size(total)} are left",
            "use a smaller model or a narrower format (dtype)",
        )


def weight_bytes(decoder: Decoder) -> int:
    """Memory of parameters and buffers, each piece of storage counted once."""
    held = [*decoder.parameters(), *decoder.buffers()]
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in held)}
    return sum(storages.values())


def memory_left(device: torch.device) -> tuple[int, int]:
    """Bytes of all memory that this process may use, and those that are free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What the allocator keeps for itself can be used again.
        return total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for limit_name, usage_name, statistics, key in GROUPS:
        limit, usage = _number(CGROUP / limit_name), _number(CGROUP / usage_name)
        if limit is not None and usage is not None and limit < total:
            # Usage has pages of files in it that give way to ours.
            total, free = limit, min(free, limit - usage + _entry(CGROUP / statistics, key))
    return total, free


def _entry(path: Path, key: str) -> int:
    try:
        lines = dict(line.split() for line in path.read_text().splitlines())
        return int(lines.get(key, 0))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or `max`
        return None


def reset_peak(device: torch.device) -> int:
    """Begin measuring a new peak; the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK)
    return resident_bytes()
