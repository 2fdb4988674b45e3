"""Attention over keys that come block by block: the online softmax, and its backward.

Two results over different keys, each with its log-sum-exp s, join to one over both:
out = out_1 + sigmoid(s_2 - s_1) (out_2 - out_1), s = log(exp s_1 + exp s_2) (Milakov and
Gimelshein 2018; Liu et al. 2023). Kept in fp32 at least, whatever the format of the inputs, so
that the number of blocks does not show in the error.
"""

from __future__ import annotations

# B batch, H query heads, K key/value heads, Q queries, T keys, E head_dim of queries and keys,
# W head_dim of values
from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.axes.cp.block import Rule, plain_backward, plain_forward
from fivefold.axes.cp.flash import flash_backward, flash_covers, flash_forward
from fivefold.axes.cp.sight import Sight
from fivefold.axes.cp.split import Run


class OnlineForward:
    """The attention of queries [B,H,Q,E] to all keys added so far."""

    def __init__(self, query: Tensor, value_dim: int, sight: Sight, rule: Rule) -> None:
        self._query, self._sight, self._rule = query, sight, rule
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = query.shape[:-1]
        self.result = query.new_zeros((*shape, value_dim), dtype=wide)  # [B,H,Q,W]
        # Log-sum-exp, [B,H,Q]: joined in fp64, or each block would add a rounding of a large number.
        self._total = query.new_full(shape, float("-inf"), dtype=torch.float64)

    @property
    def total(self) -> Tensor:
        """Log-sum-exp of all scores so far, [B,H,Q]."""
        return self._total.to(self.result.dtype)

    def add(self, key: Tensor, value: Tensor, keys: Sequence[Run]) -> None:
        """Join the keys [B,K,T,E] and values [B,K,T,W] at the places `keys`."""
        rule = self._rule
        for piece in self._sight.pieces(keys, rule.window):
            query, k, v = (
                self._query[:, :, piece.query],
                key[:, :, piece.key],
                value[:, :, piece.key],
            )
            mask = self._sight.mask(piece, keys, rule.window, query.device)
            forward = flash_forward if flash_covers(query, v, mask, rule) else plain_forward
            result, total = forward(query, k, v, mask, piece.kind == "causal", rule)
            ours, sums = self.result[:, :, piece.query], self._total[:, :, piece.query]
            share = torch.sigmoid(total - sums).masked_fill(total == float("-inf"), 0.0)
            ours.copy_(torch.lerp(ours, result, share.to(ours.dtype).unsqueeze(-1)))
            sums.copy_(torch.logaddexp(sums, total))


class OnlineBackward:
    """Gradients, block by block, given the forward's `result` and `total` over all keys."""

    def __init__(
        self,
        grad: Tensor,
        query: Tensor,
        result: Tensor,
        total: Tensor,
        sight: Sight,
        rule: Rule,
    ) -> None:
        self._grad, self._query, self._result, self._total = grad, query, result, total
        self._sight, self._rule = sight, rule
        self.query_grad = torch.zeros_like(query, dtype=total.dtype)  # of all keys added so far

    def add(
        self, key: Tensor, value: Tensor, keys: Sequence[Run], key_grad: Tensor, value_grad: Tensor
    ) -> None:
        """Add to `query_grad`, and to `key_grad` [B,K,T,E] and `value_grad` [B,K,T,W] in place."""
        rule = self._rule
        for piece in self._sight.pieces(keys, rule.window):
            rows, columns = (
                (slice(None), slice(None), piece.query),
                (slice(None), slice(None), piece.key),
            )
            query, k, v = self._query[rows], key[columns], value[columns]
            mask = self._sight.mask(piece, keys, rule.window, query.device)
            backward = flash_backward if flash_covers(query, v, mask, rule) else plain_backward
            grads = backward(
                self._grad[rows], query, k, v, self._result[rows], self._total[rows],
                mask, piece.kind == "causal", rule,
            )  # fmt: skip
            self.query_grad[rows] += grads[0]
            key_grad[columns] += grads[1]
            value_grad[columns] += grads[2]
