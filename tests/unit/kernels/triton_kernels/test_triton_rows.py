"""Triton's row-wise operators in its interpreter (nothing ran on a GPU), against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_cases import FORMATS, assert_within, few, gradients, normal, strided

from fivefold.kernels.gated import gated_reference
from fivefold.kernels.rms_norm import rms_norm_reference
from fivefold.kernels.rope import apply_rope_reference

Call = Callable[..., Any]


@few
@given(
    rows=st.sampled_from([1, 2, 17, 33]),
    size=st.sampled_from([1, 5, 64, 129]),
    dtype=FORMATS,
    offset=st.sampled_from([0.0, 1.0]),
    dense=st.booleans(),
)
def test_rms_norm(
    interpreter: Call, rows: int, size: int, dtype: torch.dtype, offset: float, dense: bool
) -> None:
    x = normal(rows, size, seed=1, dtype=dtype)
    x = x if dense else strided(x)
    weight = normal(size, seed=2, dtype=dtype)
    grad = normal(rows, size, seed=3, dtype=dtype)
    y, inverse = interpreter("rms_norm", "rms_norm", x, weight, 1e-5, offset)

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, weight, 1e-5, offset)

    expected, *slopes = gradients(exact, (x.double(), weight.double()), grad.double())
    assert_within(y, expected, 1)
    assert_within(inverse, torch.rsqrt(x.double().square().mean(-1) + 1e-5), 8)
    found = interpreter("rms_norm", "rms_norm_backward", grad, x, weight, inverse, offset)
    for actual, slope in zip(found, slopes, strict=True):
        assert_within(actual, slope, 4, terms=1)


@few
@given(rows=st.integers(1, 5), size=st.sampled_from([3, 64, 100]), dtype=FORMATS)
def test_rms_norm_after_a_residual(
    interpreter: Call, rows: int, size: int, dtype: torch.dtype
) -> None:
    x, residual = (strided(normal(2, rows, size, seed=s, dtype=dtype)) for s in (1, 2))
    weight = normal(size, seed=3, dtype=dtype)
    y, total, inverse = interpreter("rms_norm", "rms_norm_residual", x, residual, weight, 1e-6, 1.0)
    assert torch.equal(total, x + residual)
    alone, alone_inverse = interpreter("rms_norm", "rms_norm", total, weight, 1e-6, 1.0)
    assert torch.equal(y, alone)
    assert torch.equal(inverse, alone_inverse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_normalised_alike_wherever_it_lies(interpreter: Call, dtype: torch.dtype) -> None:
    x, weight = normal(33, 100, seed=1, dtype=dtype), normal(100, seed=2, dtype=dtype)
    grad = normal(33, 100, seed=3, dtype=dtype)
    y, inverse = interpreter("rms_norm", "rms_norm", x, weight, 1e-5, 0.0)
    grad_x, _ = interpreter("rms_norm", "rms_norm_backward", grad, x, weight, inverse, 0.0)
    for row in (0, 16, 32):
        one = slice(row, row + 1)
        alone, scale = interpreter("rms_norm", "rms_norm", x[one], weight, 1e-5, 0.0)
        assert torch.equal(alone, y[one])
        slope, _ = interpreter("rms_norm", "rms_norm_backward", grad[one], x[one], weight, scale)
        assert torch.equal(slope, grad_x[one])


def test_no_rows(interpreter: Call) -> None:
    x, weight = torch.empty(0, 8), torch.ones(8)
    y, inverse = interpreter("rms_norm", "rms_norm", x, weight, 1e-5)
    assert y.shape == (0, 8) and inverse.shape == (0,)
    grad_x, grad_weight = interpreter("rms_norm", "rms_norm_backward", x, x, weight, inverse)
    assert grad_x.shape == (0, 8) and torch.equal(grad_weight, torch.zeros(8))
    assert interpreter("gated", "gated", x, x, "silu").shape == (0, 8)


@few
@given(
    batch=st.integers(1, 2),
    length=st.integers(1, 4),
    heads=st.sampled_from([1, 3, 9]),
    head_dim=st.sampled_from([2, 6, 64, 80]),
    dtype=FORMATS,
    shared=st.booleans(),
)
def test_rotate(
    interpreter: Call,
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    shared: bool,
) -> None:
    x = strided(normal(batch, length, heads, head_dim, seed=1, dtype=dtype))
    angles = normal(1 if shared else batch, length, head_dim // 2, seed=2) * 9
    cos, sin = angles.cos().float(), angles.sin().float()
    y = interpreter("rope", "rotate", x, cos, sin)
    assert_within(y, apply_rope_reference(x.double(), cos.double(), sin.double()), 1)
    back = interpreter("rope", "rotate", y, cos, -sin)
    assert_within(back, x.double(), 4)


@few
@given(
    rows=st.integers(1, 3),
    size=st.sampled_from([1, 100, 1030]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    dtype=FORMATS,
)
def test_gated_on_halves_of_a_packed_tensor(
    interpreter: Call, rows: int, size: int, activation: Any, dtype: torch.dtype
) -> None:
    packed = normal(2, rows, 2 * size, seed=1, dtype=dtype)
    gate, up = packed.split(size, dim=-1)
    grad = normal(2, rows, size, seed=2, dtype=dtype)

    def exact(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gated_reference(gate, up, activation)

    expected, *slopes = gradients(exact, (gate.double(), up.double()), grad.double())
    assert_within(interpreter("gated", "gated", gate, up, activation), expected, 1, terms=1)
    found = interpreter("gated", "gated_backward", grad, gate, up, activation)
    for actual, slope in zip(found, slopes, strict=True):
        assert_within(actual, slope, 1, terms=1)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_any_size_stay_finite(interpreter: Call, activation: str) -> None:
    gate = torch.tensor([[-1e4, -90.0, -0.0, 90.0, 1e4]])
    ones = torch.ones_like(gate)
    y = interpreter("gated", "gated", gate, ones, activation)
    torch.testing.assert_close(y, torch.tensor([[0.0, 0.0, 0.0, 90.0, 1e4]]))
    for slope in interpreter("gated", "gated_backward", ones, gate, ones, activation):
        assert slope.isfinite().all()


@few
@given(
    count=st.sampled_from([1, 7, 1024, 1500]),
    gradient=FORMATS,
    copied=st.sampled_from([None, torch.bfloat16, torch.float16]),
)
def test_adamw(
    interpreter: Call, count: int, gradient: torch.dtype, copied: torch.dtype | None
) -> None:
    parameter = normal(count, seed=1, dtype=torch.float32)
    oracle = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([oracle], 1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    first, second = torch.zeros(count), torch.zeros(count)
    copy = None if copied is None else torch.full((count,), torch.nan, dtype=copied)
    for step in range(1, 4):
        grad = normal(count, seed=10 + step, dtype=gradient)
        oracle.grad = grad.float()
        optimizer.step()
        interpreter(
            "adamw",
            "adamw_",
            parameter,
            grad,
            first,
            second,
            copy,
            1e-2,
            0.9,
            0.95,
            1e-8,
            0.1,
            step,
        )
    state = optimizer.state[oracle]
    assert_within(parameter, oracle.detach().double(), 2)
    assert_within(first, state["exp_avg"].double(), 2)
    assert_within(second, state["exp_avg_sq"].double(), 2)
    if copy is not None:
        assert torch.equal(copy, parameter.to(copy.dtype))


def test_adamw_refuses_tensors_that_are_not_flat(interpreter: Call) -> None:
    x = torch.zeros(8)
    with pytest.raises(AssertionError, match="flat tensors of one size; flatten them"):
        interpreter("adamw", "adamw_", x, x[::2], x, x, None, 0.1, 0.9, 0.9, 1e-8, 0.0, 1)
