"""Attention over a cache of blocks: the bits of flash attention, whatever else the cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, held, normal
from torch import Tensor

from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.flash_attention import flash_attention
from fivefold.kernels.paged_attention import paged_attention, paged_attention_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNLISTED = -7  # what the table holds where it lists nothing


class Case(NamedTuple):
    lengths: list[int]
    queries: list[int]
    block_size: int = 16
    kv_heads: int = 2
    groups: int = 2
    head_dim: int = 16
    value_dim: int = 16
    window: int = 0
    softcap: float = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        return {"window": self.window, "scale": self.head_dim**-0.5, "softcap": self.softcap}


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def documents(case: Case, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of each sequence, with as many queries as were asked for."""
    found = []
    for i, (length, queries) in enumerate(zip(case.lengths, case.queries, strict=True)):
        heads = case.kv_heads * case.groups
        found.append((
            normal(queries, heads, case.head_dim, seed=3 * i, dtype=dtype),
            normal(length, case.kv_heads, case.head_dim, seed=3 * i + 1, dtype=dtype),
            normal(length, case.kv_heads, case.value_dim, seed=3 * i + 2, dtype=dtype),
        ))  # fmt: skip
    return found


def cached(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The operands, blocks in random order, NaN in every slot that holds no key."""
    parts = documents(case, dtype)
    size = case.block_size
    most = max((length + size - 1) // size for length in case.lengths) + 1
    order = torch.randperm(
        most * len(parts) + 2, generator=torch.Generator().manual_seed(9)
    ).tolist()
    shape = (len(order), size, case.kv_heads)
    keys = torch.full((*shape, case.head_dim), torch.nan, dtype=dtype)
    values = torch.full((*shape, case.value_dim), torch.nan, dtype=dtype)
    table = torch.full((len(parts), most), UNLISTED, dtype=torch.int32)
    for i, (_, key, value) in enumerate(parts):
        for at in range(0, key.shape[0], size):
            block = order.pop()
            table[i, at // size] = block
            count = min(size, key.shape[0] - at)
            keys[block, :count] = key[at : at + count]
            values[block, :count] = value[at : at + count]
    query = torch.cat([q for q, _, _ in parts])
    held_keys = torch.tensor(case.lengths, dtype=torch.int32)
    return query, keys, values, table, starts(*case.queries), held_keys


def contiguous(case: Case, dtype: torch.dtype) -> Tensor:
    """The same by flash attention, a sequence at a time."""
    outs = []
    for query, key, value in documents(case, dtype):
        ends = starts(query.shape[0]), starts(key.shape[0])
        outs.append(flash_attention(query, key, value, *ends, causal=True, **case.settings)[0])
    return torch.cat(outs)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 130, 200])
    lengths = draw(st.lists(length, min_size=1, max_size=4))
    dims = st.sampled_from([1, 5, 32, 33, 64, 80, 127, 128, 256])
    return Case(
        lengths,
        [draw(st.sampled_from([0, 1, 1, 1, 2, 7, 40])) for _ in lengths],
        block_size=draw(st.sampled_from([1, 7, 16, 64, 100])),
        kv_heads=draw(st.integers(1, 3)),
        groups=draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=draw(dims),
        value_dim=draw(dims),
        window=draw(st.sampled_from([0, 0, 1, 20, 64, 1000])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
    )


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New tensors hold NaN until written, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@held
@given(cases(), st.sampled_from(DTYPES))
def test_bits_of_flash_attention_and_values_of_fp64(case: Case, dtype: torch.dtype) -> None:
    operands = cached(case, dtype)
    out = paged_attention(*operands, **case.settings)
    assert torch.equal(out, contiguous(case, dtype))
    exact = paged_attention_reference(*double(*operands[:3]), *operands[3:], **case.settings)
    assert_within(out, exact, 60 if dtype == torch.float32 else 1, terms=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1100, 70])
def test_decode_and_prefill_have_the_bits_of_training(dtype: torch.dtype, window: int) -> None:
    """A forward over 2,300 tokens at once, against calls that hold any number of them so far."""
    case = Case([2300], [2300], 16, 1, 3, 20, 24, window=window)
    whole = contiguous(case, dtype)
    query, keys, values, table, _, _ = cached(case, dtype)
    held_keys = [1, 64, 65, 700, 1024, 1025, 1500, 2048, 2049, 2300]
    queries = [1, 1, 30, 1, 1, 7, 100, 1, 200, 1]
    rows = [slice(n - q, n) for n, q in zip(held_keys, queries, strict=True)]
    expected = torch.cat([whole[r] for r in rows])

    def attend(which: slice) -> Tensor:
        return paged_attention(
            torch.cat([query[r] for r in rows[which]]), keys, values,
            table.expand(len(held_keys[which]), -1), starts(*queries[which]),
            torch.tensor(held_keys[which], dtype=torch.int32), **case.settings,
        )  # fmt: skip

    assert torch.equal(attend(slice(None)), expected)
    alone = [attend(slice(i, i + 1)) for i in range(len(rows))]
    assert torch.equal(torch.cat(alone), expected)


def test_two_threads_have_the_bits_of_one() -> None:
    case = Case([3000, 90], [1, 5])
    operands = cached(case, torch.float32)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3, 64):
        torch.set_num_threads(threads)
        found.append(paged_attention(*operands, **case.settings))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_blocks_behind_the_window_may_be_given_away() -> None:
    case = Case([200, 200], [3, 1], window=20)
    query, keys, values, table, ends, held_keys = cached(case, torch.float32)
    expected = paged_attention(query, keys, values, table, ends, held_keys, **case.settings)
    freed = (200 - 3 - 20 + 1) // case.block_size
    keys[table[:, :freed].long()] = torch.nan
    values[table[:, :freed].long()] = torch.nan
    table[:, :freed] = UNLISTED
    operands = (query, keys, values, table, ends, held_keys)
    assert torch.equal(paged_attention(*operands, **case.settings), expected)
    reference = paged_attention_reference(*operands, **case.settings)
    torch.testing.assert_close(reference, expected)


def test_strided_caches() -> None:
    case = Case([40, 9], [2, 9])
    query, keys, values, *rest = cached(case, torch.bfloat16)
    expected = paged_attention(query, keys, values, *rest, **case.settings)
    both = torch.stack([keys, values], dim=2)  # one cache, keys and values of a slot side by side
    wide = torch.full((query.shape[0], 4, 33), torch.nan, dtype=torch.bfloat16)
    wide[:, :, 1:32:2] = query
    found = paged_attention(
        wide[:, :, 1:32:2], both[:, :, 0], both[:, :, 1], *rest, **case.settings
    )
    assert torch.equal(found, expected)


def test_the_operator_keeps_torchs_contract() -> None:
    case = Case([20, 3], [2, 1], 8)
    operands = (*cached(case, torch.float32), 0, 0.3, 0.0)
    torch.library.opcheck(torch.ops.fivefold.paged_attention.default, operands)

    def attend(*a: Tensor) -> Tensor:
        return paged_attention(*a, scale=0.3)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands[:6]), attend(*operands[:6]))


def changed(x: Tensor, at: tuple[int, ...], to: int) -> Tensor:
    y = x.clone()
    y[at] = to
    return y


def wrong(name: str) -> tuple[Tensor, ...]:
    query, keys, values, table, ends, held_keys = cached(Case([20, 3], [2, 1], 8), torch.float32)
    many = keys.shape[0]
    changes: dict[str, dict[int, Tensor]] = {
        "names blocks": {3: changed(table, (0, 1), many)},
        "names blocks 0": {3: changed(table, (0, 2), -1)},
        "holds 0 to 32": {5: changed(held_keys, (1,), 33)},
        "holds 0 to 32 keys by its block table, not -1": {5: changed(held_keys, (1,), -1)},
        "never fall": {4: changed(ends, (1,), -1)},
        "end within 3": {4: changed(ends, (2,), 5)},
        "block_table is int32": {3: table.long()},
        "block_table is .2, blocks": {3: table[:1]},
        "query_starts is .3": {4: ends[:2]},
        "lengths is one row": {5: held_keys.long()},
        "takes query": {1: keys[0]},
        "do not belong": {2: values[:, :4]},
        "or not to query": {0: query[..., :5]},
        "share": {0: query[:, :3]},
        "at least one key": {1: keys[:, :0], 2: values[:, :0]},
        "value_cache is torch.float32": {2: values.half()},
    }
    given_operands = [query, keys, values, table, ends, held_keys]
    for at, tensor in changes[name].items():
        given_operands[at] = tensor
    return tuple(given_operands)


WRONG = (
    "names blocks", "names blocks 0", "holds 0 to 32",
    "holds 0 to 32 keys by its block table, not -1", "never fall", "end within 3",
    "block_table is int32", "block_table is .2, blocks", "query_starts is .3",
    "lengths is one row", "takes query", "do not belong", "or not to query", "share",
    "at least one key", "value_cache is torch.float32",
)  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_operands_that_do_not_fit(message: str) -> None:
    for attend in (paged_attention, paged_attention_reference):
        with pytest.raises(KernelError, match=message) as caught:
            attend(*wrong(message), scale=0.3)
        assert "\n" not in str(caught.value)


def test_a_cache_whose_rows_have_gaps() -> None:
    query, keys, values, *rest = cached(Case([20], [1]), torch.float32)
    gaps = torch.zeros(*keys.shape, 2)[..., 0]
    with pytest.raises(KernelError, match="in one piece"):
        paged_attention(query, gaps, values, *rest, scale=0.3)
    with pytest.raises(KernelError, match="number of keys"):
        paged_attention(query, keys, values, *rest, scale=0.3, window=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("held", "heads", "head_dim", "queries", "window"),
    [(200, (9, 3), 64, 1, 0), (333, (8, 2), 80, 2, 50), (150, (4, 4), 24, 40, 0), (1100, (6, 1), 32, 1, 0)],
)  # fmt: skip
def test_keys_that_lie_dim_by_dim_give_the_same_bits(
    dtype: torch.dtype, held: int, heads: tuple[int, int], head_dim: int, queries: int, window: int
) -> None:
    """A cache [blocks,K,E,block_size] seen as [blocks,block_size,K,E]: read without packing."""
    torch.manual_seed(held)
    block, rows, (many, few) = 32, 3, heads
    blocks = -(-held // block)
    keys, values = (torch.randn(rows * blocks, block, few, head_dim).to(dtype) for _ in range(2))
    lengths = torch.tensor([held, held - 7, held - 31], dtype=torch.int32)
    across = torch.full((rows * blocks, few, head_dim, block), float("nan"), dtype=dtype)
    across = across.permute(0, 3, 1, 2)
    table = torch.randperm(rows * blocks).to(torch.int32).view(rows, blocks)
    for row, length in enumerate(lengths.tolist()):
        for place in range(length):
            slot = table[row, place // block], place % block
            across[slot] = keys[slot]
        if length < blocks * block:
            values[table[row, -1], length - (blocks - 1) * block :] = float("nan")
    query = torch.randn(rows * queries, many, head_dim).to(dtype)
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    rest = (values, table, starts, lengths)
    found = paged_attention(query, across, *rest, scale=0.2, window=window)
    keys = torch.where(across.isnan(), 0, keys)
    assert torch.equal(found, paged_attention(query, keys, *rest, scale=0.2, window=window))
    assert found.isfinite().all()


def test_keys_dim_by_dim_want_whole_panels() -> None:
    query, keys, values, *rest = cached(Case([20], [1]), torch.float32)
    across = keys.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    with pytest.raises(KernelError, match="with blocks of 32 keys"):
        paged_attention(query, across, values, *rest, scale=0.3)
