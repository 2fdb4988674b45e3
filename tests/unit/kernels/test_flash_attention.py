"""Flash attention over packed documents: against fp64, and its bits against itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import STEP, assert_within, double, held, normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.kernels import dispatch
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.flash_attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_backward_reference,
    flash_attention_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


class Case(NamedTuple):
    queries: list[int]
    keys: list[int]
    kv_heads: int = 2
    groups: int = 2
    head_dim: int = 16
    value_dim: int = 16
    causal: bool = True
    window: int = 0
    softcap: float = 0.0

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = sum(self.queries), sum(self.keys)
        return (
            normal(queries, self.kv_heads * self.groups, self.head_dim, seed=1, dtype=dtype),
            normal(keys, self.kv_heads, self.head_dim, seed=2, dtype=dtype),
            normal(keys, self.kv_heads, self.value_dim, seed=3, dtype=dtype),
        )

    def upstream(self, dtype: torch.dtype) -> Tensor:
        heads = self.kv_heads * self.groups
        return normal(sum(self.queries), heads, self.value_dim, seed=4, dtype=dtype)

    @property
    def starts(self) -> tuple[Tensor, Tensor]:
        return starts(*self.queries), starts(*self.keys)

    @property
    def settings(self) -> dict[str, Any]:
        scale = self.head_dim**-0.5
        return {
            "causal": self.causal, "window": self.window, "scale": scale, "softcap": self.softcap
        }  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Around a block of 64 keys, a strip of rows, a vector; no token, one, more queries than keys.
    length = st.sampled_from([0, 1, 2, 5, 7, 13, 31, 63, 64, 65, 100, 130])
    documents = draw(st.lists(st.tuples(length, length), min_size=1, max_size=4))
    causal = draw(st.booleans())
    dims = st.sampled_from([1, 3, 8, 32, 33, 64, 80, 96, 127, 128, 200, 256, 300])
    return Case(
        [q for q, _ in documents],
        [k for _, k in documents],
        kv_heads=draw(st.integers(1, 3)),
        groups=draw(st.sampled_from([1, 2, 3, 5, 8])),
        head_dim=draw(dims),
        value_dim=draw(dims),
        causal=causal,
        window=draw(st.sampled_from([0, 1, 3, 40, 64, 1000])) if causal else 0,
        softcap=draw(st.sampled_from([0.0, 2.0])),
    )


def one_query_at_a_time(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    rows, columns = (s.tolist() for s in case.starts)
    for document, (queries, keys) in enumerate(zip(case.queries, case.keys, strict=True)):
        for i in range(queries):
            at = keys - queries + i if case.causal else keys - 1
            seen = range(max(0, at - (case.window or keys + 1) + 1), max(at + 1, 0))
            index = torch.tensor([columns[document] + j for j in seen], dtype=torch.long)
            for h in range(query.shape[1]) if len(seen) else ():
                one = query[rows[document] + i, h]
                scores = key[index, h // case.groups] @ one * case.settings["scale"]
                if case.softcap:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                values = value[index, h // case.groups]
                out[rows[document] + i, h] = scores.softmax(0) @ values
    return out


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New tensors hold NaN until written, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(out, lse, gradients of query, key, value)."""
    leaves = [x.requires_grad_() for x in case.tensors(dtype)]
    out, lse = flash_attention(*leaves, *case.starts, **case.settings)
    return out.detach(), lse, *torch.autograd.grad(out, leaves, case.upstream(dtype))


def check(case: Case, dtype: torch.dtype, steps: float) -> None:
    out, lse, *grads = run(case, dtype)
    tensors = double(*case.tensors(dtype))
    leaves = [x.requires_grad_() for x in tensors]
    exact, exact_lse = flash_attention_reference(*leaves, *case.starts, **case.settings)
    assert_within(out, exact.detach(), steps, terms=1.0)
    assert lse.dtype == torch.float32
    blind = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    assert_within(lse[~blind], exact_lse[~blind], 16, terms=1.0)
    upstream = case.upstream(dtype).double()
    terms = max(x.abs().max().item() if x.numel() else 0.0 for x in (*leaves, upstream)) ** 2
    for actual, expected in zip(grads, torch.autograd.grad(exact, leaves, upstream), strict=True):
        assert actual.dtype == dtype
        assert_within(actual, expected, steps, terms=terms)


@held
@given(cases())
def test_fp32_equals_fp64(case: Case) -> None:
    check(case, torch.float32, 60)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (33, 127)])
def test_low_formats_equal_fp64(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    for more in ({}, {"window": 9, "softcap": 3.0}, {"causal": False}):
        check(Case([70, 0, 1, 9], [70, 3, 1, 5], 3, 3, *dims, **more), dtype, 2)


@pytest.mark.parametrize("more", [{}, {"window": 3}, {"causal": False}, {"softcap": 2.0}])
def test_reference_is_softmax_attention_one_query_at_a_time(more: dict[str, Any]) -> None:
    case = Case([5, 0, 1, 7], [5, 3, 4, 4], 2, 3, 5, 6, **more)
    tensors = case.tensors(torch.float64)
    out, _ = flash_attention_reference(*tensors, *case.starts, **case.settings)
    torch.testing.assert_close(out, one_query_at_a_time(case, *tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "more",
    [
        {"window": 2, "softcap": 1.5},
        *(pytest.param(more, marks=pytest.mark.slow) for more in ({}, {"causal": False})),
    ],
)
def test_the_operator_has_the_right_gradient(more: dict[str, Any]) -> None:
    case = Case([3, 1, 0, 4], [3, 2, 1, 2], 2, 2, 3, 2, **more)
    leaves = tuple(x.requires_grad_() for x in case.tensors(torch.float64))

    def attend(*a: Tensor) -> Tensor:
        return flash_attention(*a, *case.starts, **case.settings)[0]

    assert torch.autograd.gradcheck(attend, leaves)


# ---- bits ----

LONG = Case([150, 1, 0, 40], [150, 90, 0, 200], 2, 3, 48, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [{}, {"window": 50, "softcap": 3.0}])
def test_a_document_has_the_same_bits_alone(dtype: torch.dtype, more: dict[str, Any]) -> None:
    case = LONG._replace(**more)
    together = run(case, dtype)
    rows, columns = (s.tolist() for s in case.starts)
    for i in range(len(case.queries)):
        queries, keys = slice(rows[i], rows[i + 1]), slice(columns[i], columns[i + 1])
        tensors = case.tensors(dtype)
        leaves = [
            x[s].clone().requires_grad_()
            for x, s in zip(tensors, (queries, keys, keys), strict=True)
        ]
        ends = starts(case.queries[i]), starts(case.keys[i])
        out, lse = flash_attention(*leaves, *ends, **case.settings)
        grads = torch.autograd.grad(out, leaves, case.upstream(dtype)[queries])
        assert torch.equal(out, together[0][queries])
        assert torch.equal(lse, together[1][:, queries])
        for alone, all_rows, s in zip(grads, together[2:], (queries, keys, keys), strict=True):
            assert torch.equal(alone, all_rows[s])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1100, 70])
def test_queries_in_chunks_have_the_bits_of_all_at_once(dtype: torch.dtype, window: int) -> None:
    # 2,200 keys: three parts of 1,024, merged.
    length = 2200
    case = Case([length], [length], 1, 3, 20, 24, window=window)
    query, key, value = case.tensors(dtype)
    whole, _ = flash_attention(query, key, value, *case.starts, **case.settings)
    edges = [0, 1, 2, 40, 64, 65, 200, 1023, 1024, 1025, 1500, 2047, 2048, 2049, 2199, length]
    for start, end in pairwise(edges):
        chunk, _ = flash_attention(
            query[start:end], key[:end], value[:end], starts(end - start), starts(end),
            **case.settings,
        )  # fmt: skip
        assert torch.equal(chunk, whole[start:end]), (start, end)


@pytest.mark.parametrize("case", [LONG, LONG._replace(queries=[1], keys=[3000])])
def test_two_threads_have_the_bits_of_one(case: Case) -> None:
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(run(case, torch.float32))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_keys_that_no_query_sees_change_no_bit() -> None:
    case = Case([3], [300], window=20)
    query, key, value = case.tensors(torch.float32)
    expected = flash_attention(query, key, value, *case.starts, **case.settings)
    key[:270], value[:270] = torch.nan, torch.nan
    found = flash_attention(query, key, value, *case.starts, **case.settings)
    assert all(map(torch.equal, expected, found))


# ---- layouts, and rows outside ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_operands(dtype: torch.dtype) -> None:
    case = LONG
    expected = run(case, dtype)

    def apart(x: Tensor) -> Tensor:
        """The same values with gaps between rows and heads, one element off any alignment."""
        wide = torch.full((x.shape[0], x.shape[1] + 2, x.shape[2] + 3), torch.nan, dtype=dtype)
        view = wide[:, 1:-1, 1:-2]
        view.copy_(x)
        return view

    def crosswise(x: Tensor) -> Tensor:
        return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    for layout in (apart, crosswise):
        query, key, value = map(layout, case.tensors(dtype))
        out, lse = flash_attention(query, key, value, *case.starts, **case.settings)
        grad = layout(case.upstream(dtype))
        grads = flash_attention_backward(
            grad, query, key, value, layout(out), lse, *case.starts, **case.settings
        )
        assert all(map(torch.equal, (out, lse, *grads), expected))


def test_rows_outside_all_documents_are_zeros_without_gradient() -> None:
    query, key, value = (normal(9, 2, 8, seed=i, dtype=torch.float32) for i in range(3))
    ends = torch.tensor([2, 5, 7], dtype=torch.int32)
    settings = {"causal": True, "scale": 0.3}
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = flash_attention(*leaves, ends, ends, **settings)
    outside = [0, 1, 7, 8]
    assert not out[outside].any()
    assert (lse[:, outside] == -torch.inf).all()
    for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)):
        assert not grad[outside].any()
        assert grad[2:7].any()
    expected, _ = flash_attention_reference(*double(*leaves), ends, ends, **settings)
    assert_within(out.detach(), expected.detach(), 20)


def test_no_rows_and_no_documents() -> None:
    nothing = torch.zeros(0, 2, 8)
    for ends in (starts(), starts(0, 0)):
        out, lse = flash_attention(nothing, nothing, nothing, ends, ends, causal=True, scale=1.0)
        assert out.shape == (0, 2, 8)
        assert lse.shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_of_parts_of_the_keys_adds_up(dtype: torch.dtype) -> None:
    """What a ring of ranks does: each has some keys, and the sums over all of them."""
    case = Case([40], [80], causal=False)
    query, key, value = case.tensors(dtype)
    out, lse, d_query, d_key, d_value = run(case, dtype)
    rest = (out, lse, starts(40), starts(40))
    halves = [
        flash_attention_backward(
            case.upstream(dtype), query, key[s], value[s], *rest, **case.settings
        )
        for s in (slice(0, 40), slice(40, 80))
    ]
    assert_within(halves[0][0] + halves[1][0], d_query, 4, terms=1.0)
    assert_within(torch.cat([h[1] for h in halves]), d_key, 2)
    assert_within(torch.cat([h[2] for h in halves]), d_value, 2)


# ---- accuracy, and torch's machinery ----


def test_error_in_bf16_is_no_larger_than_torchs() -> None:
    case = Case([256, 256], [256, 256], 2, 2, 64, 64)
    found = run(case, torch.bfloat16)
    tensors = case.tensors(torch.bfloat16)
    leaves = [x.requires_grad_() for x in double(*tensors)]
    exact, _ = flash_attention_reference(*leaves, *case.starts, **case.settings)
    upstream = case.upstream(torch.bfloat16)
    exact_grads = torch.autograd.grad(exact, leaves, upstream.double())

    def heads_first(x: Tensor) -> Tensor:
        return x.detach().unflatten(0, (2, 256)).transpose(1, 2)

    theirs = [heads_first(x).requires_grad_() for x in tensors]
    out = F.scaled_dot_product_attention(*theirs, is_causal=True, scale=0.125, enable_gqa=True)
    grads = torch.autograd.grad(out, theirs, heads_first(upstream))
    for own, other, true in zip(
        (found[0], *found[2:]), (out, *grads), (exact, *exact_grads), strict=True
    ):
        flat = other.detach().transpose(1, 2).flatten(0, 1).double()
        own_error, error = ((x.double() - true.detach()).norm() for x in (own, flat))
        assert own_error <= error * 1.02
        assert (own - true).abs().max() <= STEP[torch.bfloat16] * max(1, true.abs().max())


def test_the_operator_keeps_torchs_contract() -> None:
    case = Case([5, 3], [5, 4], head_dim=8, value_dim=12)
    for dtype in (torch.float32, torch.float64):
        leaves = [x.requires_grad_() for x in case.tensors(dtype)]
        operands = (*leaves, *case.starts, True, 3, 0.3, 1.0)
        torch.library.opcheck(torch.ops.fivefold.flash_attention.default, operands)
        out, lse = (x.detach() for x in torch.ops.fivefold.flash_attention(*operands))
        plain = [x.detach() for x in leaves]
        operands = (out, *plain, out, lse, *case.starts, True, 3, 0.3, 1.0)
        torch.library.opcheck(torch.ops.fivefold.flash_attention_backward.default, operands)


@pytest.mark.parametrize("wrap", ["compile", "checkpoint"])
def test_compiled_and_recomputed(wrap: str) -> None:
    case = Case([30, 9], [30, 9])
    expected = run(case, torch.float32)

    def attend(*a: Tensor) -> Tensor:
        return flash_attention(*a, *case.starts, **case.settings)[0]

    leaves = [x.requires_grad_() for x in case.tensors(torch.float32)]
    if wrap == "compile":
        out = torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves)
    else:
        out = checkpoint(attend, *leaves, use_reentrant=False)
    grads = torch.autograd.grad(out, leaves, case.upstream(torch.float32))
    assert torch.equal(out.detach(), expected[0])
    assert all(map(torch.equal, grads, expected[2:]))


def test_lse_has_no_gradient() -> None:
    leaves = [x.requires_grad_() for x in Case([3], [3]).tensors(torch.float32)]
    out, lse = flash_attention(*leaves, starts(3), starts(3), causal=True, scale=1.0)
    assert out.requires_grad
    assert not lse.requires_grad


# ---- bad input ----


def operands() -> dict[str, Any]:
    query, key, value = Case([4, 3], [4, 6]).tensors(torch.float32)
    return {
        "query": query, "key": key, "value": value, "query_starts": starts(4, 3),
        "key_starts": starts(4, 6), "causal": True, "scale": 0.5,
    }  # fmt: skip


WRONG = {
    "query_starts never fall": {"query_starts": torch.tensor([0, 5, 4], dtype=torch.int32)},
    "query_starts never fall: -1": {"query_starts": torch.tensor([-1, 3, 7], dtype=torch.int32)},
    "query_starts end within 7": {"query_starts": torch.tensor([0, 4, 8], dtype=torch.int32)},
    "key_starts end within 10": {"key_starts": torch.tensor([0, 4, 2**30], dtype=torch.int32)},
    "starts are": {"key_starts": torch.tensor([0, 4], dtype=torch.int32)},
    "one row of int32": {"key_starts": torch.tensor([0, 4, 10])},
    "query_starts is one row": {"query_starts": torch.zeros(1, 3, dtype=torch.int32)},
    "takes query": {"query": torch.zeros(7, 4)},
    "not belong": {"value": torch.zeros(9, 2, 16)},
    "not to query|or not": {"key": torch.zeros(10, 2, 15)},
    "share": {"query": torch.zeros(7, 3, 16)},
    "at least 1": {"value": torch.zeros(10, 2, 0)},
    "key is torch.float32": {"key": torch.zeros(10, 2, 16, dtype=torch.bfloat16)},
    "key is .* on cpu": {"key": torch.zeros(10, 2, 16, device="meta")},
    "looks back": {"window": 3, "causal": False},
    "number of keys": {"window": -3},
}


@pytest.mark.parametrize("message", WRONG)
def test_operands_that_do_not_fit(message: str) -> None:
    bad = operands() | WRONG[message]
    if "meta" not in str(bad["key"].device):
        with pytest.raises(KernelError, match=message) as caught:
            flash_attention(**bad)
        assert "\n" not in str(caught.value)
    if bad["key"].dtype == torch.float32:
        with pytest.raises(KernelError, match=message):
            flash_attention_reference(**bad)


@pytest.mark.parametrize("name", ["grad", "out", "lse"])
def test_results_that_do_not_belong(name: str) -> None:
    good = operands()
    out, lse = flash_attention(**good)
    results = {"grad": out, "out": out, "lse": lse} | {name: torch.zeros(1, 2, 3)}
    for backward in (flash_attention_backward, flash_attention_backward_reference):
        with pytest.raises(KernelError, match=f"{name} is"):
            backward(**good, **results)


def test_native_is_what_is_tested() -> None:
    if not dispatch.is_native("flash_attention", "cpu", torch.float32):
        pytest.skip("no native kernels here")
    out = torch.empty(0)
    assert dispatch.choose("flash_attention", "cpu", out.dtype).implementation == "native"
