"""`linear` on each of its paths against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_rounded_once, assert_within, double, gradients, held, normal

from fivefold.kernels import linear as module
from fivefold.kernels.dispatch import NATIVE_ON_CPU, low_precision_gemm_is_native
from fivefold.kernels.linear import linear, linear_reference

LOW = [torch.bfloat16, torch.float16]
shapes = st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=3), *[st.integers(1, 40)] * 2)


def operands(shape: tuple[list[int], int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rows, inputs, outputs = shape
    return (
        normal(*rows, inputs, seed=1, dtype=dtype),
        normal(outputs, inputs, seed=2, dtype=dtype),
        normal(outputs, seed=3, dtype=dtype),
    )


@pytest.fixture(params=[True, False], ids=["native", "through-fp32"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both paths on every machine, whatever its instructions."""
    monkeypatch.setattr(module, "low_precision_gemm_is_native", lambda *_: request.param)
    return request.param


@held
@given(shapes)
def test_fp32_is_within_a_few_roundings_of_fp64(shape: tuple[list[int], int, int]) -> None:
    x, weight, bias = operands(shape, torch.float32)
    # At most 40 products: each addition rounds once, by half a step of a partial sum.
    assert_within(linear(x, weight, bias), linear_reference(*double(x, weight, bias)), 20)
    assert_within(linear(x, weight), linear_reference(*double(x, weight)), 20)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", [([1], 37, 9), ([2, 3], 64, 5), ([7], 40, 40), ([0], 8, 4)])
def test_low_formats_are_within_a_step_of_fp64(
    path: bool, dtype: torch.dtype, shape: tuple[list[int], int, int]
) -> None:
    x, weight, bias = operands(shape, dtype)
    upstream = normal(*shape[0], shape[2], seed=4, dtype=dtype)
    found = gradients(linear, (x, weight, bias), upstream)
    exact = gradients(linear_reference, double(x, weight, bias), upstream)
    for actual, expected in zip(found, exact, strict=True):
        # Half a step where rounded once at the end; torch's own may round the bias apart: one.
        assert_within(actual, expected, 1.0)
        assert actual.dtype == dtype


@pytest.mark.parametrize("dtype", LOW)
def test_through_fp32_rounds_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "low_precision_gemm_is_native", lambda *_: False)
    inputs = operands(([40], 48, 24), dtype)
    upstream = normal(40, 24, seed=4, dtype=dtype)
    found = gradients(linear, inputs, upstream)
    exact = gradients(linear_reference, double(*inputs), upstream)
    for actual, expected in zip(found, exact, strict=True):
        assert_rounded_once(actual, expected)


@pytest.mark.parametrize("dtype", LOW)
def test_few_rows_without_gradients_equal_many_rows(path: bool, dtype: torch.dtype) -> None:
    x, weight, bias = operands(([64], 48, 24), dtype)
    with torch.no_grad():
        many = linear(x, weight, bias)
        few = torch.cat([linear(x[i : i + 2], weight, bias) for i in range(0, 64, 2)])
    assert_within(few, many.double(), 1.0)


@pytest.mark.parametrize("dtype", LOW)
def test_saved_for_backward_stays_in_the_low_format(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "low_precision_gemm_is_native", lambda *_: False)
    x, weight, bias = (t.requires_grad_() for t in operands(([9], 16, 8), dtype))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, weight, bias)
    assert saved
    assert {t.dtype for t in saved} == {dtype}


def test_gradient_of_a_frozen_weight_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "low_precision_gemm_is_native", lambda *_: False)
    x, weight, _ = operands(([9], 16, 8), torch.bfloat16)
    linear(x.requires_grad_(), weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_reference_has_the_right_gradient() -> None:
    inputs = tuple(t.requires_grad_() for t in operands(([2, 2], 3, 4), torch.float64))
    assert torch.autograd.gradcheck(linear_reference, inputs)


def test_dispatch_asks_the_machine_for_low_formats_alone() -> None:
    assert low_precision_gemm_is_native("cpu", torch.float32)
    assert low_precision_gemm_is_native("cpu", torch.float64)
    assert low_precision_gemm_is_native("cuda", torch.bfloat16)
    for dtype in LOW:
        assert low_precision_gemm_is_native("cpu", dtype) == (dtype in NATIVE_ON_CPU)
