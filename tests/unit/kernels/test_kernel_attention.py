"""Attention's paths against one query at a time in fp64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, gradients, held, normal
from torch import Tensor

from fivefold.kernels import attention as module
from fivefold.kernels.attention import attention, attention_reference


class Case(NamedTuple):
    batch: int
    queries: int
    keys: int
    kv_heads: int
    groups: int
    head_dim: int
    masking: str  # none, causal, shared (one mask for all rows), own (a mask a row)
    softcap: float | None
    value_dim: int | None = None  # None: head_dim; latent attention's differs

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.kv_heads * self.groups
        return (
            normal(self.batch, self.queries, heads, self.head_dim, seed=1, dtype=dtype),
            normal(self.batch, self.keys, self.kv_heads, self.head_dim, seed=2, dtype=dtype),
            normal(self.batch, self.keys, self.kv_heads, self.value_width, seed=3, dtype=dtype),
        )

    @property
    def value_width(self) -> int:
        return self.value_dim or self.head_dim

    def settings(self) -> dict[str, Any]:
        rows = {"shared": 1, "own": self.batch}.get(self.masking)
        mask = None
        if rows is not None:
            generator = torch.Generator().manual_seed(5)
            mask = torch.rand(rows, self.queries, self.keys, generator=generator) < 0.6
            mask[..., 0] |= ~mask.any(-1)  # every query looks somewhere
        causal = self.masking == "causal"
        return {"mask": mask, "causal": causal, "scale": 0.31, "softcap": self.softcap}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    masking = draw(st.sampled_from(["none", "causal", "shared", "own"]))
    queries = draw(st.integers(1, 9))
    return Case(
        batch=draw(st.integers(1, 3)),
        queries=queries,
        keys=queries if masking == "causal" else draw(st.integers(1, 12)),
        kv_heads=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 10)) * 2,
        masking=masking,
        softcap=draw(st.sampled_from([None, 2.0])),
        value_dim=draw(st.sampled_from([None, 3, 24])),
    )


def one_query_at_a_time(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain loops over rows, heads and queries."""
    given_settings = case.settings()
    out = query.new_zeros(*query.shape[:-1], case.value_width)
    for b in range(case.batch):
        for h in range(query.shape[2]):
            for q in range(case.queries):
                sees = torch.ones(case.keys, dtype=torch.bool)
                if given_settings["causal"]:
                    sees[q + 1 :] = False
                if given_settings["mask"] is not None:
                    sees &= given_settings["mask"][b % given_settings["mask"].shape[0], q]
                keys, values = key[b, sees, h // case.groups], value[b, sees, h // case.groups]
                scores = keys @ query[b, q, h] * given_settings["scale"]
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                out[b, q, h] = scores.softmax(0) @ values
    return out


@held
@given(cases())
def test_reference_is_softmax_attention_one_query_at_a_time(case: Case) -> None:
    tensors = case.tensors(torch.float64)
    torch.testing.assert_close(
        attention_reference(*tensors, **case.settings()),
        one_query_at_a_time(case, *tensors),
        rtol=1e-12,
        atol=1e-12,
    )


@held
@given(cases())
def test_fp32_equals_fp64(case: Case) -> None:
    check(case, torch.float32, 30)


@pytest.mark.parametrize("native", [True, False], ids=["native", "through-fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_formats_equal_fp64(
    dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "low_precision_gemm_is_native", lambda *_: native)
    # Torch's own low-format kernel rounds the softmax too; through fp32 the output alone is
    # rounded, and what backward reads of it.
    for masking in ("none", "causal", "shared", "own"):
        for groups in (1, 3):
            for width in (None, 10):
                case = Case(2, 7, 7, 2, groups, 16, masking, None, width)
                check(case, dtype, 4 if native else 2)


def check(case: Case, dtype: torch.dtype, steps: float) -> None:
    tensors = case.tensors(dtype)
    upstream = normal(*tensors[0].shape[:-1], case.value_width, seed=4, dtype=dtype)
    settings = case.settings()
    found = gradients(lambda *a: attention(*a, **settings), tensors, upstream)
    exact = gradients(
        lambda *a: attention_reference(*a, **settings), double(*tensors), upstream.double()
    )
    # Gradients of query and key are differences of terms of the size of values and upstream.
    terms = tensors[2].abs().max().item() * upstream.abs().max().item()
    for actual, expected in zip(found, exact, strict=True):
        assert actual.dtype == dtype
        assert_within(actual, expected, steps, terms=terms)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("masking", ["causal", "own"])
def test_reference_has_the_right_gradient(masking: str, softcap: float | None) -> None:
    case = Case(2, 3, 3, 1, 2, 4, masking, softcap)
    inputs = tuple(t.requires_grad_() for t in case.tensors(torch.float64))
    assert torch.autograd.gradcheck(lambda *a: attention_reference(*a, **case.settings()), inputs)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_may_look_nowhere_gets_zeros(
    dtype: torch.dtype, softcap: float | None
) -> None:
    case = Case(2, 4, 6, 2, 2, 8, "own", softcap)
    tensors = [t.requires_grad_() for t in case.tensors(dtype)]
    settings = case.settings()
    settings["mask"][1, 2] = False
    out = attention(*tensors, **settings)
    assert not out[1, 2].any()
    out.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in tensors)


def test_through_fp32_keeps_the_low_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "low_precision_gemm_is_native", lambda *_: False)
    case = Case(1, 8, 8, 2, 2, 16, "causal", None)
    tensors = [t.requires_grad_() for t in case.tensors(torch.bfloat16)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attention(*tensors, **case.settings())
    wide = [t for t in saved if t.dtype != torch.bfloat16]
    assert [t.numel() for t in wide] == [8 * 4]  # a log-sum-exp a query and head
