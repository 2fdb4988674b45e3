"""The attention step that training, prefill and decode share: 64 rows meet 64 keys.

Online softmax (Milakov and Gimelshein 2018) as in FlashAttention (Dao et al. 2022): a row keeps the
largest score so far, the sum of exponentials under it and the sum of values weighted by them. Keys
are walked in blocks aligned to position 0 of the row's own sequence. A block in which a row sees
nothing multiplies what it holds by exactly 1 and adds exactly 0. So a row's bits depend neither on
its neighbours, nor on how the queries were cut into calls.

Keys are also grouped in parts of 1,024, each started afresh and merged in order into what came
before. Decoding may then give the parts of one row to many processors (split-KV, Flash-Decoding),
and still get the bits of a training pass that walked them one after another.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

import torch

from fivefold.core.errors import FivefoldError
from fivefold.kernels.triton.gated import tanh
from fivefold.kernels.triton.language import PRECISION, tl, triton

ROWS = 64  # the fewest that Hopper's warp-group products take
KEYS = 64
PART = 1024
WIDEST_HEAD = 256
NARROWEST_DOT = 16
# Numbers of the call that must not choose which program is compiled.
VARYING = ["count", "sequences", "window"]
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def blocks_of_heads(head_dim: int, value_dim: int) -> dict[str, int]:
    """Block widths that hold a head: powers of two, which the tails of other widths mask."""
    if max(head_dim, value_dim) > WIDEST_HEAD:
        raise FivefoldError(
            f"attention on GPUs takes heads of up to {WIDEST_HEAD} dims, not "
            f"{max(head_dim, value_dim)}",
            "use the reference, attention_reference",
        )
    widths = (max(triton.next_power_of_2(d), NARROWEST_DOT) for d in (head_dim, value_dim))
    return dict(zip(("E_BLOCK", "G_BLOCK"), widths, strict=True))


def launch_options(head_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Warps and pipeline stages, by head size and format alone. The paths must agree on warps.

    Wide heads get 8 warps so that the sums stay in registers, and one stage where two would not
    fit in shared memory.
    """
    bytes_a_key = (head_dim + value_dim) * dtype.itemsize
    return {"num_warps": 8 if max(head_dim, value_dim) > 128 else 4,
            "num_stages": 2 if bytes_a_key <= 1024 else 1}  # fmt: skip


@triton.jit
def load_rows(
    start: tl.tensor, offsets: tl.tensor, inside: tl.tensor, size: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Rows of `size` numbers at start + offsets, zeros where a row is not `inside` and in the tail."""
    column = tl.arange(0, BLOCK)
    at = start + offsets[:, None] + column[None, :]
    return tl.load(at, mask=inside[:, None] & (column < size)[None, :], other=0.0)


@triton.jit
def first_seen(position: tl.tensor, window: tl.tensor) -> tl.tensor:
    """The first key that a query at `position` sees; `window` 0 hides nothing."""
    return tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)


@triton.jit
def seen_of(
    position: tl.tensor,
    key: tl.tensor,
    keys: tl.tensor,
    window: tl.tensor,
    CAUSAL: tl.constexpr,
) -> tl.tensor:
    """Whether the query at `position` sees `key`: broadcast, [R,1] with [1,T] or either way round."""
    seen = (key < keys) & ((window <= 0) | (key > position - window))
    if CAUSAL:
        seen = seen & (key <= position)
    return seen


@triton.jit
def scores_of(
    left: tl.tensor, right: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Capped scores [R,T] of rows [R,E] with rows [T,E]: of queries with keys, or the other way."""
    scores = tl.dot(left, tl.trans(right), input_precision=PRECISION) * scale
    if SOFTCAP > 0:
        scores = tanh(scores / SOFTCAP) * SOFTCAP
    return scores


@triton.jit
def absorb(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    seen: tl.tensor,
    weighted: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A block of keys [T,E] and values [T,G] into what rows [R,E] hold: [R,G], [R], [R].

    In powers of two, for which there is an instruction: e^x is 2^(x log2 e).
    """
    scores = tl.where(seen, scores_of(query, key, scale, SOFTCAP) * LOG2E, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, axis=1))
    # Rows that have seen nothing yet: -inf less -inf is not a number, -inf less 0 is.
    base = tl.where(larger == float("-inf"), 0.0, larger)
    shrink = tl.exp2(largest - base)
    weights = tl.exp2(scores - base[:, None])
    total = tl.fma(total, shrink, tl.sum(weights, axis=1))
    weighted = tl.dot(
        weights.to(value.dtype), value, weighted * shrink[:, None], input_precision=PRECISION
    )
    return weighted, larger, total


@triton.jit
def merge(
    weighted: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    part_weighted: tl.tensor,
    part_largest: tl.tensor,
    part_total: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The next part of the keys into what came before. Exact where either has seen nothing.

    Fused multiply-adds are asked for: left to the compiler, it may fuse one product here in one
    kernel and the other in another, and split and unsplit attention would differ in a last bit.
    """
    larger = tl.maximum(largest, part_largest)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    old, new = tl.exp2(largest - base), tl.exp2(part_largest - base)
    kept = tl.broadcast_to(old[:, None], weighted.shape)
    weighted = tl.fma(weighted, kept, part_weighted * new[:, None])
    return weighted, larger, tl.fma(total, old, part_total * new)


@triton.jit
def normalised(weighted: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Attention's output; zeros for rows that saw nothing."""
    return weighted / tl.where(total == 0.0, 1.0, total)[:, None]
