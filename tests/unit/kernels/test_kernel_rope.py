"""Rotary positions: the rotation against complex numbers, the frequencies against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, gradients, held, normal
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fivefold.kernels.rope import (
    apply_rope,
    apply_rope_reference,
    inverse_frequencies,
    rope_tables,
)
from fivefold.model.config import RopeConfig

PLAIN = RopeConfig(theta=10_000.0)
KINDS = ["linear", "dynamic", "llama3", "yarn"]


def places(*shape: int, end: int = 1000) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, end, shape, generator=generator)


@held
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 16),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_rotation_equals_complex_multiplication(
    batch: int, length: int, heads: int, half: int, dtype: torch.dtype
) -> None:
    x, upstream = (normal(batch, length, heads, 2 * half, seed=s, dtype=dtype) for s in (1, 2))
    cos, sin = rope_tables(places(batch, length), PLAIN, 2 * half, 1000)
    found = gradients(lambda a: apply_rope(a, cos, sin), (x,), upstream)
    exact = gradients(lambda a: apply_rope_reference(a, cos, sin), double(x), upstream.double())
    for actual, expected in zip(found, exact, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        else:
            assert_within(actual, expected, 2 if dtype == torch.float32 else 0.6)


@pytest.mark.parametrize("function", [apply_rope, apply_rope_reference])
def test_gradient_is_the_derivative(function: Any) -> None:
    cos, sin = rope_tables(places(2, 3), PLAIN, 6, 1000)
    x = normal(2, 3, 2, 6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: function(a, cos.double(), sin.double()), (x,))


def test_scores_depend_on_distances_alone() -> None:
    query, key = (normal(1, 1, 1, 16, seed=s) for s in (1, 2))

    def score(at: int, to: int) -> Tensor:
        turned = [
            apply_rope(x, *(t.double() for t in rope_tables(torch.tensor([[p]]), PLAIN, 16, 1000)))
            for x, p in ((query, at), (key, to))
        ]
        return (turned[0] * turned[1]).sum()

    # The tables are fp32: angles up to 500 are off by 500 x 2^-24.
    torch.testing.assert_close(score(7, 3), score(504, 500), rtol=0, atol=1e-3)
    assert abs(score(7, 3) - score(8, 3)) > 1e-2


def test_tables_are_fp32_and_row_by_row() -> None:
    positions = torch.tensor([[0, 1, 2], [0, 0, 70_000]])
    cos, sin = rope_tables(positions, PLAIN, 8, 1000)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (2, 3, 4)
    torch.testing.assert_close(cos[1, 2, 0], torch.tensor(70_000.0).cos())
    torch.testing.assert_close(sin[0, 2, 1], torch.tensor(2 * 10_000**-0.25).sin())


@st.composite
def scalings(draw: st.DrawFn) -> tuple[RopeConfig, dict[str, Any], int, int]:
    """(our setting, transformers' setting, head_dim, context length)."""
    kind = draw(st.sampled_from(["default", *KINDS]))
    head_dim = 2 * draw(st.integers(2, 64))
    context = draw(st.sampled_from([64, 2048, 131_072]))
    ours: dict[str, Any] = {"theta": draw(st.sampled_from([1e4, 5e5, 1e6]))}
    theirs: dict[str, Any] = {"rope_type": kind, "rope_theta": ours["theta"]}

    def set_both(name: str, value: Any, foreign: str = "") -> None:
        ours[name] = theirs[foreign or name] = value

    if kind != "default":
        set_both("factor", draw(st.sampled_from([1.0, 2.0, 8.0, 32.0])))
    if kind in ("llama3", "yarn"):
        original = context // draw(st.sampled_from([1, 4, 16]))
        set_both("original_positions", original, "original_max_position_embeddings")
    if kind == "llama3":
        set_both("low_freq_factor", draw(st.sampled_from([0.5, 1.0])))
        set_both("high_freq_factor", draw(st.sampled_from([2.0, 4.0])))
    if kind == "yarn":
        set_both("beta_fast", draw(st.sampled_from([16.0, 32.0])))
        set_both("beta_slow", draw(st.sampled_from([1.0, 2.0])))
        set_both("truncate", draw(st.booleans()))
        set_both("attention_factor", draw(st.sampled_from([None, 0.7, 1.3])))
    return RopeConfig(kind=kind, **ours), theirs, head_dim, context


@held
@given(scalings(), st.floats(0, 4))
def test_frequencies_equal_transformers(
    drawn: tuple[RopeConfig, dict[str, Any], int, int], stretch: float
) -> None:
    scaling, theirs, head_dim, context = drawn
    length = max(1, int(context * stretch))
    found, amplitude = inverse_frequencies(torch.tensor([[length - 1]]), scaling, head_dim, context)
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=context,
        rope_parameters=theirs,
    )
    if scaling.kind == "default":
        expected = 1 / scaling.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        factor = 1.0
    else:
        compute = ROPE_INIT_FUNCTIONS[scaling.kind]
        expected, factor = compute(config, "cpu", seq_len=torch.tensor(length))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert amplitude == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_scaling_changes_the_frequencies(kind: Any) -> None:
    at_the_end = torch.tensor([[8191]])
    scaled = RopeConfig(kind=kind, factor=4.0, original_positions=1024)
    assert not torch.allclose(
        inverse_frequencies(at_the_end, scaled, 32, 4096)[0],
        inverse_frequencies(at_the_end, PLAIN, 32, 4096)[0],
    )


def test_dynamic_leaves_the_model_alone_up_to_its_context_length() -> None:
    scaling = RopeConfig(kind="dynamic", factor=4.0)
    within, _ = inverse_frequencies(torch.tensor([[127, 3]]), scaling, 32, 128)
    beyond, _ = inverse_frequencies(torch.tensor([[3, 128]]), scaling, 32, 128)
    plain, _ = inverse_frequencies(torch.tensor([[0]]), PLAIN, 32, 128)
    torch.testing.assert_close(within, plain)
    assert (beyond[1:] < plain[1:]).all()


def test_unknown_scaling_is_named() -> None:
    with pytest.raises(ValueError, match="longrope"):
        inverse_frequencies(torch.zeros(1, 1), RopeConfig(kind="longrope"), 8, 64)  # type: ignore[arg-type]
