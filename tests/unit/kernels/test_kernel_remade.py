"""Projections whose backward makes its operand again: of gated activations, of normalised tensors."""

from __future__ import annotations

# N tokens, F operand, O outputs
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import gradients, held, normal
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.gated_linear import gated_linear, gated_linear_reference
from fivefold.kernels.linear import linear
from fivefold.kernels.normed_linear import Recipe, carry, normed_linear, recipe_of
from fivefold.kernels.rms_norm import rms_norm
from fivefold.model.config import ModelConfig
from fivefold.model.families import parse_config
from fivefold.model.norm import RMSNorm
from fivefold.model.projection import Projection

EPS = 1e-5
FORMATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def after_gate(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gated_linear(gate, up, weight, bias, "silu")


def after_gate_reference(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gated_linear_reference(gate, up, weight, bias, "silu")


def after_norm(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return normed_linear(rms_norm(x, scale, EPS, 1.0), weight, bias, Recipe(x, scale, EPS, 1.0))


def after_norm_reference(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(rms_norm(x, scale, EPS, 1.0), weight, bias)


PAIRS: dict[str, Any] = {
    "gated": (after_gate, after_gate_reference),
    "normed": (after_norm, after_norm_reference),
}


def operands(kind: str, lead: list[int], f: int, o: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = normal(*lead, f, seed=1, dtype=dtype)
    second = normal(*lead, f, seed=2, dtype=dtype) if kind == "gated" else normal(f, seed=2)
    weight, bias = normal(o, f, seed=3, dtype=dtype), normal(o, seed=4, dtype=dtype)
    return x, second.to(dtype), weight, bias


@held
@given(
    st.sampled_from(sorted(PAIRS)),
    st.lists(st.integers(1, 9), min_size=1, max_size=2),
    st.integers(1, 40),
    st.integers(1, 20),
    st.sampled_from(FORMATS),
    st.booleans(),
)
def test_the_bits_of_the_two_operators(
    kind: str, lead: list[int], f: int, o: int, dtype: torch.dtype, invariant: bool
) -> None:
    given, upstream = operands(kind, lead, f, o, dtype), normal(*lead, o, seed=5, dtype=dtype)
    one, two = PAIRS[kind]
    with dispatch.deterministic(invariant):
        found, expected = (gradients(f, given, upstream) for f in (one, two))
    for actual, exact in zip(found, expected, strict=True):
        assert torch.equal(actual, exact)


@pytest.mark.parametrize("kind", sorted(PAIRS))
def test_gradients_are_the_derivative(kind: str) -> None:
    leaves = [x.requires_grad_() for x in operands(kind, [3], 5, 4, torch.float64)]
    assert torch.autograd.gradcheck(PAIRS[kind][0], leaves)


@pytest.mark.parametrize("kind", sorted(PAIRS))
@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_what_is_frozen_gets_no_gradient(kind: str, frozen: int) -> None:
    given = operands(kind, [3], 8, 4, torch.float32)
    found: list[list[Tensor | None]] = []
    for function in PAIRS[kind]:
        leaves = [x.clone().requires_grad_(i != frozen) for i, x in enumerate(given)]
        function(*leaves).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for i, (actual, expected) in enumerate(zip(*found, strict=True)):
        assert (actual is None) == (expected is None) == (i == frozen)
        assert actual is None or torch.equal(actual, expected)  # type: ignore[arg-type]


def kept(function: Callable[[], Tensor]) -> set[int]:
    """Addresses of what autograd keeps."""
    found: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (found.add(t.data_ptr()), t)[1], lambda t: t
    ):
        function()
    return found


@pytest.mark.parametrize("kind", sorted(PAIRS))
def test_the_operand_is_not_kept(kind: str) -> None:
    given = [x.requires_grad_() for x in operands(kind, [6], 8, 4, torch.float32)]
    allowed = {x.data_ptr() for x in given}
    extra = kept(lambda: PAIRS[kind][0](*given)) - allowed
    # The norm also keeps a number a row.
    assert len(extra) == (1 if kind == "normed" else 0)
    assert len(kept(lambda: PAIRS[kind][1](*given)) - allowed) == len(extra) + 1


def small() -> ModelConfig:
    return parse_config({
        "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    })  # fmt: skip


def test_a_norm_hands_its_recipe_to_projections_where_gradients_are_wanted() -> None:
    norm, projection = RMSNorm(small()), Projection(8, 4, bias=False)
    torch.nn.init.normal_(projection.weight)
    x = normal(3, 8, seed=1, dtype=torch.float32).requires_grad_()
    recipe = recipe_of(norm(x))
    assert recipe is not None and recipe.x is x
    normed = norm(x)
    assert normed.data_ptr() not in kept(lambda: projection(normed))
    other = normed + 0
    assert other.data_ptr() in kept(lambda: projection(other))
    with torch.no_grad():
        assert recipe_of(norm(x)) is None


def test_a_recipe_stays_with_its_tensor() -> None:
    x = normal(3, 8, seed=1)
    y = carry(x.clone(), Recipe(x, x[0], EPS, 0.0))
    assert all(recipe_of(z) is None for z in (y.view(-1), y + 1, y.detach(), y[0]))
