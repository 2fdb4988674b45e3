"""What attention runs over is handed in: one document a row, packed documents, a cache.

The decoder calls a backend with each layer's query, key and value, and knows nothing of masks,
caches or ranks.
"""

from __future__ import annotations

# B batch, S sequence, H query heads, K key/value heads, E head_dim, G dims of values
from typing import Protocol

import torch
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.attention import attention
from fivefold.kernels.flash_attention import flash_attention


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
        batch, length = query.shape[:2]
        if is_flash(query):
            # Made anew: a kept one would be a second case for the compiler to guard.
            starts = row_starts(batch, length, query.device)
            return over_documents(query, key, value, starts, window, scale, softcap)
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

    A document lies in one piece. Its bounds, or masks one per window, serve all layers.
    """

    def __init__(self, documents: Tensor) -> None:
        self._documents = documents
        self._starts: Tensor | None = None
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
        if is_flash(query):
            if self._starts is None:
                self._starts = document_starts(self._documents)
            return over_documents(query, key, value, self._starts, window, scale, softcap)
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


def is_flash(query: Tensor) -> bool:
    """Whether attention is by documents' bounds, without masks."""
    return dispatch.is_own("flash_attention", query.device.type, query.dtype)


def over_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """[B,S,H,E], [B,S,K,E], [B,S,K,G] to [B,S,H,G], where documents begin at `starts` of B*S."""
    attended, _ = flash_attention(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), starts, starts,
        causal=True, scale=scale, window=window or 0, softcap=softcap or 0.0,
    )  # fmt: skip
    return attended.unflatten(0, query.shape[:2])


def row_starts(batch: int, length: int, device: torch.device) -> Tensor:
    """Where each of B rows begins among all tokens, and the end: [B+1] int32."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def document_starts(documents: Tensor) -> Tensor:
    """Where the numbers in `documents` [B,S] change, or a row begins, and the end: int32."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten().to(torch.int32)
    return torch.cat((starts, starts.new_tensor([documents.numel()])))


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[B,Q,T], True where the key's place is not after the query's nor out of its window."""
    back = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    return back >= 0 if window is None else (back >= 0) & (back < window)
