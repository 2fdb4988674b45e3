"""The decode step without a value on the host: one recording of it replays for every token.

A step on a GPU launches hundreds of small kernels, and launching takes longer than running them. A
CUDA graph replays them with one call, over the same memory each time: what changes between steps
(tokens, lengths) lies in tensors that are written before a replay. Run on CPUs, where the same
code runs unrecorded; recording itself was not run on a GPU.
"""

from __future__ import annotations

# B batch, C capacity, K key/value heads, E head_dim, H query heads, V vocabulary
from collections.abc import Callable

import torch
from torch import Tensor

from fivefold.kernels.paged_attention import paged_attention
from fivefold.model.attention_backend import row_starts
from fivefold.model.cache import KVCache
from fivefold.model.decoder import Decoder

WARM_UP_STEPS = 3  # before recording: libraries allocate workspaces and choose kernels


class StaticAttention:
    """One token a row, appended at `lengths` [B] int64 of a cache whose tensors do not move."""

    def __init__(self, cache: KVCache, lengths: Tensor) -> None:
        self._cache = cache
        self._lengths = lengths
        self._rows = torch.arange(lengths.shape[0], device=lengths.device)
        self._table = self._rows.to(torch.int32).unsqueeze(1)  # a row is one block
        self._starts = row_starts(lengths.shape[0], 1, lengths.device)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """[B,1,H,E], [B,1,K,E], [B,1,K,G] to [B,1,H,G]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_put_((self._rows, self._lengths), key[:, 0])
        values.index_put_((self._rows, self._lengths), value[:, 0])
        held = self._lengths.to(torch.int32) + 1
        attended = paged_attention(
            query[:, 0], keys, values, self._table, self._starts, held,
            scale=scale, window=window or 0, softcap=softcap or 0.0,
        )  # fmt: skip
        return attended.unsqueeze(1)


class CapturedStep:
    """Decodes one token for every row of `cache`, from the same memory to the same memory.

    Holds for as long as the cache's tensors are these (`fits`): growing or cutting it moves them.
    """

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        device, rows = cache.keys[0].device, len(cache.lengths)
        self._decoder = decoder
        self._address = cache.keys[0].data_ptr()
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._lengths = torch.tensor(cache.lengths, dtype=torch.int64, device=device)
        self._attention = StaticAttention(cache, self._lengths)
        self._step = record(self._run) if device.type == "cuda" else self._run

    def fits(self, cache: KVCache) -> bool:
        """Whether `cache` is still where it was."""
        same = len(cache.lengths) == self._tokens.shape[0]
        return same and cache.keys[0].data_ptr() == self._address

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """[B] ids -> [B,V] fp32 logits, which the next call overwrites. `cache.advance` after it."""
        self._tokens.copy_(tokens)
        self._lengths.copy_(torch.tensor(cache.lengths))
        return self._step()

    def _run(self) -> Tensor:
        hidden = self._decoder(
            self._tokens.unsqueeze(1), self._lengths.unsqueeze(1), self._attention
        )
        return self._decoder.logits(hidden[:, 0])


def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`run` as a CUDA graph. It must read and write the same tensors each time, on the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
