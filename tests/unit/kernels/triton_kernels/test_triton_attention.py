"""Triton's attention in its interpreter (nothing ran on a GPU), against fp64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from triton_cases import FORMATS, assert_within, few, gradients, normal, steps, strided

Call = Callable[..., Any]


class Rule(NamedTuple):
    causal: bool = True
    window: int = 0
    scale: float = 0.3
    softcap: float = 0.0


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: list[int], keys: list[int], rule: Rule
) -> tuple[Tensor, Tensor]:
    """(out [N,H,G], log-sum-exp [H,N]), document by document, all scores at once."""
    group = query.shape[1] // key.shape[1]
    outs, sums = [], []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) * rule.scale
        if rule.softcap:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        p = torch.arange(len(q))[:, None] + len(k) - len(q)
        j = torch.arange(len(k))[None, :]
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if rule.causal:
            seen &= j <= p
        if rule.window:
            seen &= j > p - rule.window
        scores = scores.masked_fill(~seen, -1e300)
        weights = (scores.softmax(-1) if len(k) else scores) * seen
        outs.append(torch.einsum("hqk,khg->qhg", weights, v))
        blank = ~seen.any(-1)
        lse = scores.logsumexp(-1) if len(k) else scores.new_zeros(scores.shape[:2])
        sums.append(lse.masked_fill(blank, float("-inf")))
    return torch.cat(outs), torch.cat(sums, dim=1)


class Heads(NamedTuple):
    kv: int
    group: int
    head_dim: int
    value_dim: int


# (queries, keys) of each document: none, one, tails of blocks, fewer keys than queries.
DOCUMENTS = st.lists(
    st.sampled_from([(0, 0), (1, 1), (5, 5), (65, 65), (3, 70), (7, 4), (2, 0), (0, 3), (1, 130)]),
    min_size=1,
    max_size=3,
)
RULES = st.builds(
    Rule,
    causal=st.booleans(),
    window=st.sampled_from([0, 1, 4, 66, 500]),
    scale=st.just(0.3),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
)
HEADS = st.sampled_from(
    [Heads(1, 1, 16, 16), Heads(2, 3, 24, 24), Heads(1, 4, 40, 20), Heads(1, 1, 8, 72)]
)


def inputs(
    documents: list[tuple[int, int]], heads: Heads, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = (sum(each) for each in zip(*documents, strict=True))
    return (
        strided(normal(queries, heads.kv * heads.group, heads.head_dim, seed=1, dtype=dtype)),
        normal(keys, heads.kv, heads.head_dim, seed=2, dtype=dtype),
        strided(normal(keys, heads.kv, heads.value_dim, seed=3, dtype=dtype)),
    )


@few
@given(documents=DOCUMENTS, heads=HEADS, rule=RULES, dtype=FORMATS)
@example([(70, 70), (0, 0), (1, 1)], Heads(1, 2, 24, 24), Rule(window=66), torch.bfloat16)
@example([(5, 5)], Heads(1, 1, 200, 256), Rule(softcap=2.0), torch.float32)
def test_flash_attention(
    interpreter: Call,
    documents: list[tuple[int, int]],
    heads: Heads,
    rule: Rule,
    dtype: torch.dtype,
) -> None:
    queries, keys = (list(each) for each in zip(*documents, strict=True))
    tensors = inputs(documents, heads, dtype)
    lengths = starts_of(queries), starts_of(keys)
    out, lse = interpreter("flash_attention", "flash_attention", *tensors, *lengths, *rule)
    upstream = strided(normal(*out.shape, seed=4, dtype=dtype))

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return exact_attention(query, key, value, queries, keys, rule)[0]

    wide = tuple(t.double() for t in tensors)
    expected, *slopes = gradients(exact, wide, upstream.double())
    sums = exact_attention(*wide, queries, keys, rule)[1]
    assert_within(out, expected, steps(dtype, 4), terms=1)
    seen = sums.isfinite()
    assert torch.equal(lse.isneginf(), ~seen)
    assert_within(lse[seen], sums[seen], 32, terms=1)
    assert not out[(~seen).all(0)].any()
    found = interpreter(
        "flash_attention_backward", "flash_attention_backward",
        upstream, *tensors, out, lse, *lengths, *rule,
    )  # fmt: skip
    for actual, slope in zip(found, slopes, strict=True):
        assert_within(actual, slope, steps(dtype, 4), terms=2)


def test_long_contexts_are_merged_in_parts(interpreter: Call) -> None:
    rule = Rule(window=1500)
    tensors = inputs([(70, 2200)], Heads(1, 1, 16, 16), torch.float32)
    lengths = starts_of([70]), starts_of([2200])
    out, lse = interpreter("flash_attention", "flash_attention", *tensors, *lengths, *rule)
    wide = tuple(t.double() for t in tensors)
    expected, sums = exact_attention(*wide, [70], [2200], rule)
    assert_within(out, expected, 32)
    assert_within(lse, sums, 8)


def test_a_ring_sums_the_gradients_of_parts_of_the_keys(interpreter: Call) -> None:
    """Ranks that hold other keys hand in the total output and log-sum-exp."""
    rule = Rule(causal=False)
    query, key, value = inputs([(9, 20)], Heads(1, 2, 16, 16), torch.float32)
    lengths = starts_of([9]), starts_of([20])
    out, lse = interpreter("flash_attention", "flash_attention", query, key, value, *lengths, *rule)
    grad = normal(*out.shape, seed=4, dtype=torch.float32)
    whole = interpreter(
        "flash_attention_backward", "flash_attention_backward",
        grad, query, key, value, out, lse, *lengths, *rule,
    )  # fmt: skip
    parts = [
        interpreter(
            "flash_attention_backward", "flash_attention_backward",
            grad, query, key[half], value[half], out, lse, starts_of([9]), starts_of([10]), *rule,
        )
        for half in (slice(0, 10), slice(10, 20))
    ]  # fmt: skip
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), whole[1])
    torch.testing.assert_close(torch.cat([parts[0][2], parts[1][2]]), whole[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_has_the_same_bits_in_any_batch(interpreter: Call, dtype: torch.dtype) -> None:
    rule, heads = Rule(window=40, softcap=5.0), Heads(1, 2, 24, 24)
    documents = [3, 70, 20]
    query, key, value = inputs([(n, n) for n in documents], heads, dtype)
    grad = normal(*query.shape, seed=4, dtype=dtype)

    def run(rows: slice, lengths: list[int]) -> tuple[Tensor, ...]:
        tensors = tuple(t[rows] for t in (query, key, value))
        starts = starts_of(lengths), starts_of(lengths)
        out, lse = interpreter("flash_attention", "flash_attention", *tensors, *starts, *rule)
        slopes = interpreter(
            "flash_attention_backward", "flash_attention_backward",
            grad[rows], *tensors, out, lse, *starts, *rule,
        )  # fmt: skip
        return out, lse.mT, *slopes

    together = run(slice(0, 93), documents)
    for alone, whole in zip(run(slice(3, 73), [70]), together, strict=True):
        assert torch.equal(alone, whole[3:73])


class Cache(NamedTuple):
    keys: Tensor
    values: Tensor
    table: Tensor


def cache_of(
    key: Tensor, value: Tensor, lengths: list[int], block_size: int, spare: int = 1
) -> Cache:
    """Keys and values of all sequences in shuffled blocks; whatever else there is, is NaN."""
    needed = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(7))
    table = torch.full((len(lengths), max(needed) + spare), 10**6, dtype=torch.int32)
    caches = [
        torch.full((len(order), block_size, *x.shape[1:]), torch.nan, dtype=x.dtype)
        for x in (key, value)
    ]
    taken = 0
    parts = zip(key.split(lengths), value.split(lengths), needed, strict=True)
    for row, (k, v, blocks) in enumerate(parts):
        mine = order[taken : taken + blocks]
        taken += blocks
        table[row, :blocks] = mine.int()
        for cache, x in zip(caches, (k, v), strict=True):
            for number, block in enumerate(mine.tolist()):
                piece = x[number * block_size : (number + 1) * block_size]
                cache[block, : len(piece)] = piece
    return Cache(caches[0], caches[1], table)


@few
@given(
    documents=st.lists(
        st.sampled_from([(1, 1), (1, 70), (5, 5), (0, 9), (40, 65), (0, 0), (3, 2)]),
        min_size=1,
        max_size=3,
    ),
    heads=HEADS,
    rule=RULES,
    block_size=st.sampled_from([16, 5]),
    dtype=FORMATS,
)
def test_paged_attention(
    interpreter: Call,
    documents: list[tuple[int, int]],
    heads: Heads,
    rule: Rule,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    rule = rule._replace(causal=True)
    queries, lengths = (list(each) for each in zip(*documents, strict=True))
    query, key, value = inputs(documents, heads, dtype)
    padded = torch.cat([query, query.new_full((2, *query.shape[1:]), torch.nan)])
    cache = cache_of(key, value, lengths, block_size)
    out = interpreter(
        "paged_attention", "paged_attention", padded, *cache, starts_of(queries),
        torch.tensor(lengths, dtype=torch.int32), *rule[1:],
    )  # fmt: skip
    wide = (t.double() for t in (query, key, value))
    assert_within(
        out[:-2], exact_attention(*wide, queries, lengths, rule)[0], steps(dtype, 4), terms=1
    )
    assert not out[-2:].any()
    starts = starts_of(queries), starts_of(lengths)
    trained, _ = interpreter(
        "flash_attention", "flash_attention", query, key, value, *starts, *rule
    )
    assert torch.equal(out[:-2], trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_equals_prefill_in_chunks_and_decode(
    interpreter: Call, dtype: torch.dtype
) -> None:
    rule, length = Rule(window=70), 90
    query, key, value = inputs([(length, length)], Heads(1, 3, 24, 24), dtype)
    starts = starts_of([length])
    out, _ = interpreter(
        "flash_attention", "flash_attention", query, key, value, starts, starts, *rule
    )
    cache = cache_of(key, value, [length], 16)
    cuts = [0, 37, 88, 89, 90]
    for begin, end in pairwise(cuts):
        chunk = interpreter(
            "paged_attention", "paged_attention", query[begin:end], *cache,
            starts_of([end - begin]), torch.tensor([end], dtype=torch.int32), *rule[1:],
        )  # fmt: skip
        assert torch.equal(chunk, out[begin:end])


def test_split_keys_merge_to_the_bits_of_one_walk(interpreter: Call) -> None:
    """Few queries give every part of the keys a program; a training pass walks them in one."""
    rule, lengths = Rule(), [2100, 30]
    query, key, value = inputs([(2, 2100), (1, 30)], Heads(1, 2, 16, 16), torch.float32)
    starts = starts_of([2, 1])
    walked, _ = interpreter(
        "flash_attention", "flash_attention", query, key, value, starts, starts_of(lengths), *rule
    )
    sizes = torch.tensor(lengths, dtype=torch.int32)
    for spare in (0, 70):  # of blocks, and so another number of splits
        cache = cache_of(key, value, lengths, 32, spare)
        call = (query, *cache, starts, sizes, *rule[1:])
        assert torch.equal(interpreter("paged_attention", "paged_attention", *call), walked)
    limit = interpreter("paged_attention", "__getattribute__", "SPLIT_BYTES")
    interpreter("paged_attention", "__setattr__", "SPLIT_BYTES", 0)
    assert torch.equal(interpreter("paged_attention", "paged_attention", *call), walked)
    interpreter("paged_attention", "__setattr__", "SPLIT_BYTES", limit)
