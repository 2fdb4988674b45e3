"""What attention runs over is handed in: one document a row, packed documents, a cache.

The decoder calls a backend with each layer's query, key and value, and knows nothing of masks,
caches or ranks.
"""

from __future__ import annotations

# B batch, S sequence, H query heads, K key/value heads, E head_dim, G dims of values
from typing import Protocol

import torch
from torch import Tensor

from fivefold.kernels.attention import attention


class AttentionBackend(Protocol):
    """Attention of one layer: [B,S,H,E], [B,S,K,E], [B,S,K,G] to [B,S,H,G].

    G is E but for latent attention.
    """

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
        """`window`: tokens a query may look back on, itself included; None for all."""
        ...


class CausalAttention:
    """One document a row, from its first token on."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], Tensor] = {}

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
        """Causal attention, in a window where the layer has one."""
        length = query.shape[1]
        mask = None
        if window is not None and window < length:
            if (window, length) not in self._masks:
                places = torch.arange(length, device=query.device).unsqueeze(0)
                self._masks[window, length] = causal_mask(places, places, window)
            mask = self._masks[window, length]
        return attention(
            query, key, value, mask=mask, causal=mask is None, scale=scale, softcap=softcap
        )


class PackedAttention:
    """Several documents a row: `documents` [B,S] numbers them, -1 is padding.

    Masks are built once per window and serve all layers.
    """

    def __init__(self, documents: Tensor) -> None:
        self._documents = documents
        self._masks: dict[int | None, Tensor] = {}

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
        """Causal attention inside each document."""
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return attention(
            query, key, value, mask=self._masks[window], causal=False, scale=scale, softcap=softcap
        )

    def _build(self, window: int | None) -> Tensor:
        places = torch.arange(self._documents.shape[1], device=self._documents.device).unsqueeze(0)
        same = self._documents.unsqueeze(-1) == self._documents.unsqueeze(-2)
        # Padding looks at itself and its like, so that no row of the softmax is empty.
        return same & causal_mask(places, places, window)


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[B,Q,T], True where the key's place is not after the query's nor out of its window."""
    back = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    return back >= 0 if window is None else (back >= 0) & (back < window)
