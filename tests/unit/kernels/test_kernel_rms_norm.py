"""RMSNorm against its reference and fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_rounded_once, assert_within, double, gradients, held, normal
from torch import Tensor

from fivefold.kernels.rms_norm import rms_norm, rms_norm_reference

OFFSETS = [0.0, 1.0]


def case(rows: list[int], size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(*rows, size, seed=1, dtype=dtype),
        normal(size, seed=2, dtype=dtype),
        normal(*rows, size, seed=3, dtype=dtype),
    )


@held
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 70),
    st.sampled_from(OFFSETS),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_value_and_gradients_equal_the_reference(
    rows: list[int], size: int, offset: float, dtype: torch.dtype
) -> None:
    x, weight, upstream = case(rows, size, dtype)
    found = gradients(lambda *a: rms_norm(*a, 1e-5, offset), (x, weight), upstream)
    exact = gradients(
        lambda *a: rms_norm_reference(*a, 1e-5, offset), double(x, weight), upstream.double()
    )
    # The gradient of x is the difference of two terms of this size.
    largest = (upstream * (weight + offset)).abs().max() / x.square().mean(-1).sqrt().min()
    for actual, expected in zip(found, exact, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        else:
            # Computed in fp32 and rounded once: half a step; in fp32 itself the sums round too.
            steps = 40 if dtype == torch.float32 else 0.6
            assert_within(actual, expected, steps, terms=largest.item())


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("function", [rms_norm, rms_norm_reference])
def test_gradients_are_the_derivative(function: object, offset: float) -> None:
    x, weight, _ = case([2, 3], 5, torch.float64)
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda *a: function(*a, 1e-5, offset), inputs)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", OFFSETS)
def test_low_formats_are_rounded_once(dtype: torch.dtype, offset: float) -> None:
    x, weight, upstream = case([40], 64, dtype)
    found = gradients(lambda *a: rms_norm(*a, 1e-5, offset), (x, weight), upstream)
    exact = gradients(
        lambda *a: rms_norm_reference(*a, 1e-5, offset), double(x, weight), upstream.double()
    )
    for actual, expected in zip(found, exact, strict=True):
        assert_rounded_once(actual, expected)


def test_rows_of_zeros_stay_zero_and_finite() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    y = rms_norm(x, torch.ones(8), 1e-6)
    y.sum().backward()
    assert not y.any()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_keeps_the_input_and_one_number_a_row() -> None:
    x = normal(6, 32, seed=1, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(32, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-6)
    assert sum(t.numel() for t in saved) == x.numel() + weight.numel() + 6
