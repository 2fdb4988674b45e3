"""One step's tokens, flat: chunks of prompts and single tokens in one row, with where each belongs."""

from __future__ import annotations

# N tokens, S sequences, W rows whose logits are wanted
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from fivefold.engines.serve.paged.cache import PagedCache
from fivefold.engines.serve.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Tensors of one step, in the order of the plan's chunks."""

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64, each token's place in its sequence."""
    slots: Tensor
    """[N] int64, where each token's key and value go: block * block_size + offset."""
    block_table: Tensor
    """[S, most blocks] int32; a row ends with zeros that mean nothing."""
    query_starts: Tensor
    """[S+1] int32, where each sequence's tokens begin, and the end."""
    lengths: Tensor
    """[S] int32, tokens that each sequence holds after this step."""
    rows: Tensor
    """[W] int64, tokens whose logits are wanted, ascending."""

    @classmethod
    def of(cls, plan: StepPlan, cache: PagedCache, whole: Collection[int] = ()) -> PagedBatch:
        """The plan's chunks. All rows of the sequences `whole` are wanted, of others the last."""
        chunks = plan.chunks
        starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
        counts = np.fromiter((c.count for c in chunks), np.int64, len(chunks))
        ends = starts + counts
        query_starts = np.zeros(len(chunks) + 1, np.int64)
        np.cumsum(counts, out=query_starts[1:])
        total = int(query_starts[-1])
        pieces = (c.sequence.tokens[c.start : c.start + c.count] for c in chunks)
        tokens = np.fromiter(chain.from_iterable(pieces), np.int64, total)
        owner = np.repeat(np.arange(len(chunks)), counts)
        positions = np.arange(total) - (query_starts[:-1] - starts)[owner]
        table = _table(plan, ends, cache.block_size)
        block, offset = np.divmod(positions, cache.block_size)
        slots = table[owner, block].astype(np.int64) * cache.block_size + offset
        wanted = np.fromiter((c.samples for c in chunks), bool, len(chunks))
        if whole:
            every = np.fromiter((c.sequence.id in whole for c in chunks), bool, len(chunks))
            mask = every[owner]
            mask[query_starts[1:][wanted] - 1] = True
            rows = mask.nonzero()[0]
        else:
            rows = query_starts[1:][wanted] - 1

        def put(values: np.ndarray, dtype: type = np.int64) -> Tensor:
            return torch.from_numpy(values.astype(dtype, copy=False)).to(cache.device)

        return cls(
            tokens=put(tokens),
            positions=put(positions),
            slots=put(slots),
            block_table=put(table, np.int32),
            query_starts=put(query_starts, np.int32),
            lengths=put(ends, np.int32),
            rows=put(rows),
        )  # fmt: skip


def _table(plan: StepPlan, ends: np.ndarray, block_size: int) -> np.ndarray:
    """[S, most blocks] int32: the blocks that this step reads or writes."""
    used = -(-ends // block_size)
    width = int(used.max(initial=0))
    table = np.zeros((len(ends), width), np.int32)
    blocks = (
        chunk.sequence.block_table[:count]
        for chunk, count in zip(plan.chunks, used.tolist(), strict=True)
    )
    filled = np.arange(width) < used[:, None]
    table[filled] = np.fromiter(chain.from_iterable(blocks), np.int32, int(used.sum()))
    return table
