"""Attention whose bits do not depend on the batch, by plain torch: for machines without a compiler.

Every product is of one fixed shape, 64 queries by 64 keys, tiles aligned to the positions of the
sequence. A query has the same row of the same products whatever is computed beside it. That costs
a tile of 64 for a single query, and so is a fallback.
"""

from __future__ import annotations

# N queries, M keys, H query heads, K key/value heads, E head_dim, G value dims
# Q queries of one sequence, T its keys
import torch
from torch import Tensor

BLOCK = 64


def attention_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `flash_attention`, forward alone: ([N,H,G], [H,N] fp32)."""
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    lse = query.new_full((query.shape[1], query.shape[0]), -torch.inf, dtype=torch.float32)
    rows, columns = query_starts.tolist(), key_starts.tolist()
    for i in range(len(rows) - 1):
        queries, keys = slice(rows[i], rows[i + 1]), slice(columns[i], columns[i + 1])
        sequence = _Sequence(query[queries], key[keys], value[keys], causal, scale, window, softcap)
        for tile, found, total in sequence.tiles():
            out[queries][tile] = found.to(out.dtype)
            lse[:, queries][:, tile] = total
    return out, lse


class _Sequence:
    """One sequence in fp32, heads first, keys padded to whole blocks."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        scale: float,
        window: int,
        softcap: float,
    ) -> None:
        self.causal, self.scale, self.window, self.softcap = causal, scale, window, softcap
        self.count, self.held = query.shape[0], key.shape[0]
        self.offset = self.held - self.count if causal else 0  # position of the first query
        self.width = value.shape[2]
        groups = query.shape[1] // key.shape[1]
        self.query = query.float().transpose(0, 1)
        self.key = _blocks(key.float().repeat_interleave(groups, dim=1))
        self.value = _blocks(value.float().repeat_interleave(groups, dim=1))

    def tiles(self) -> list[tuple[slice, Tensor, Tensor]]:
        """(queries, [queries,H,G], log-sum-exp [H,queries]) of each tile of positions."""
        found = []
        first = self.offset // BLOCK
        last = (self.offset + self.count - 1) // BLOCK
        for tile in range(first, last + 1) if self.count else ():
            start = max(tile * BLOCK - self.offset, 0)
            stop = min((tile + 1) * BLOCK - self.offset, self.count)
            out, total = self._tile(tile, start, stop)
            found.append((slice(start, stop), out, total))
        return found

    def _tile(self, tile: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        at = start + self.offset - tile * BLOCK  # row of the first query within the tile
        heads, _, dim = self.query.shape
        rows = self.query.new_zeros(heads, BLOCK, dim)
        rows[:, at : at + stop - start] = self.query[:, start:stop]
        places = torch.arange(tile * BLOCK, (tile + 1) * BLOCK, device=rows.device)
        most = rows.new_full((heads, BLOCK, 1), -torch.inf)
        total = rows.new_zeros(heads, BLOCK, 1)
        mixed = rows.new_zeros(heads, BLOCK, self.width)
        for index, (keys, values) in enumerate(zip(self.key, self.value, strict=True)):
            if self.causal and index > tile:
                break
            scores = torch.bmm(rows, keys.transpose(1, 2)) * self.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            scores = scores.masked_fill(~self._seen(places, index), -torch.inf)
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))
            finite = higher.masked_fill(higher == -torch.inf, 0.0)
            weights = torch.exp(scores - finite)
            fade = torch.exp(most - finite)
            total = total * fade + weights.sum(-1, keepdim=True)
            mixed = mixed * fade + torch.bmm(weights, values)
            most = higher
        out = mixed / total.masked_fill(total == 0, 1.0)
        lse = (most + total.log()).squeeze(-1)
        mine = slice(at, at + stop - start)
        return out[:, mine].transpose(0, 1), lse[:, mine]

    def _seen(self, places: Tensor, index: int) -> Tensor:
        """[64,64]: whether the query at a place sees a key of block `index`."""
        keys = torch.arange(index * BLOCK, (index + 1) * BLOCK, device=places.device)
        seen = (keys < self.held).expand(BLOCK, -1)
        if self.causal:
            back = places.unsqueeze(1) - keys
            seen = seen & (back >= 0)
            if self.window:
                seen = seen & (back < self.window)
        return seen


def _blocks(x: Tensor) -> tuple[Tensor, ...]:
    """[T,H,E] as blocks [H,64,E], zeros behind the end."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % BLOCK))
    return padded.transpose(0, 1).split(BLOCK, dim=1)
