"""SwiGLU and GeGLU against their reference and fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, gradients, held, normal
from torch import Tensor

from fivefold.kernels.gated import Activation, gated, gated_reference

ACTIVATIONS: list[Activation] = ["silu", "gelu_tanh"]


@held
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_value_and_gradients_equal_the_reference(
    shape: list[int], activation: Activation, dtype: torch.dtype
) -> None:
    gate, up = (3 * normal(*shape, seed=s, dtype=dtype) for s in (1, 2))
    upstream = normal(*shape, seed=3, dtype=dtype)
    found = gradients(lambda *a: gated(*a, activation), (gate, up), upstream)
    exact = gradients(
        lambda *a: gated_reference(*a, activation), double(gate, up), upstream.double()
    )
    for actual, expected in zip(found, exact, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        else:
            # The activation is rounded, then the product: two halves of a step. fp32 also has
            # the error of its own exp and tanh.
            assert_within(actual, expected, 8 if dtype == torch.float32 else 1.1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("function", [gated, gated_reference])
def test_gradients_are_the_derivative(function: object, activation: Activation) -> None:
    gate, up = (normal(3, 4, seed=s).requires_grad_() for s in (1, 2))
    assert torch.autograd.gradcheck(lambda *a: function(*a, activation), (gate, up))  # type: ignore[operator]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_do_not_overflow(activation: Activation) -> None:
    gate = torch.tensor([-3e4, -100.0, 0.0, 100.0, 3e4], requires_grad=True)
    y = gated(gate, torch.ones(5), activation)
    y.sum().backward()
    assert y.tolist() == [0.0, 0.0, 0.0, 100.0, 3e4]
    assert gate.grad is not None
    assert gate.grad.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keeps_its_two_inputs_alone(activation: Activation) -> None:
    gate, up = (normal(4, 8, seed=s).requires_grad_() for s in (1, 2))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated(gate, up, activation)
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), up.data_ptr()]
