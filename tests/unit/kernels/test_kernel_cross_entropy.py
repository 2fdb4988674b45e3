"""Chunked cross-entropy against the whole logits, and what it never allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, held, normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.kernels import cross_entropy as module
from fivefold.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference


def case(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, ignored: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return (
        normal(tokens, hidden, seed=1, dtype=dtype),
        normal(vocabulary, hidden, seed=2, dtype=dtype),
        labels,
    )


def with_gradients(
    function: Any, hidden: Tensor, weight: Tensor, labels: Tensor, **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and both gradients of 1.7 times the loss."""
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    loss = function(hidden, weight, labels, **settings)
    (1.7 * loss).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


shapes = st.tuples(st.integers(0, 20), st.integers(1, 16), st.integers(1, 50))
settings_drawn = st.fixed_dictionaries(
    {"softcap": st.sampled_from([None, 3.0]), "z_loss": st.sampled_from([0.0, 1e-2])}
)


@held
@given(shapes, settings_drawn, st.integers(1, 25), st.sampled_from([0.0, 0.3, 1.0]))
def test_equals_the_whole_logits(
    shape: tuple[int, int, int], settings: dict[str, Any], chunk: int, ignored: float
) -> None:
    inputs = case(*shape, torch.float64, ignored)
    found = with_gradients(linear_cross_entropy, *inputs, chunk=chunk, **settings)
    exact = with_gradients(linear_cross_entropy_reference, *inputs, **settings)
    for actual, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@held
@given(shapes, settings_drawn)
def test_fp32_equals_fp64(shape: tuple[int, int, int], settings: dict[str, Any]) -> None:
    hidden, weight, labels = case(*shape, torch.float32)
    found = with_gradients(linear_cross_entropy, hidden, weight, labels, chunk=7, **settings)
    exact = with_gradients(
        linear_cross_entropy_reference, *double(hidden, weight), labels, **settings
    )
    # Slopes lie in [-1, 1] times 1.7 and are sums over the tokens: their roundings count.
    terms = 1.7 * max(1.0, float(len(labels))) * 4
    for actual, expected in zip(found, exact, strict=True):
        assert_within(actual, expected, 30, terms=terms)


@pytest.mark.parametrize("native", [True, False], ids=["native", "through-fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 10.0])
def test_low_formats_equal_fp64(
    dtype: torch.dtype, native: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "low_precision_gemm_is_native", lambda *_: native)
    hidden, weight, labels = case(70, 32, 90, dtype)
    hidden = hidden / 4  # logits of a few units, as a model's
    loss, *found = with_gradients(
        linear_cross_entropy, hidden, weight, labels, chunk=16, softcap=softcap
    )
    exact_loss, *exact = with_gradients(
        linear_cross_entropy_reference, *double(hidden, weight), labels, softcap=softcap
    )
    assert loss.dtype == torch.float32
    # Native: logits are rounded by the GEMM, half a step of about 4, over 49 targets.
    allowed = 1e-5 if not native else 2e-3
    assert loss.item() == pytest.approx(exact_loss.item(), rel=allowed)
    for actual, expected in zip(found, exact, strict=True):
        assert actual.dtype == dtype
        # Rounded when stored and again when scaled; native, the slopes and logits as well.
        assert_within(actual, expected, 4 if native else 1.1)


@pytest.mark.parametrize("wanted", ["hidden", "weight", "neither", "no_grad"])
def test_only_the_gradients_that_are_wanted(wanted: str) -> None:
    hidden, weight, labels = case(10, 4, 12, torch.float32)
    hidden.requires_grad_(wanted in ("hidden", "no_grad"))
    weight.requires_grad_(wanted in ("weight", "no_grad"))
    with torch.set_grad_enabled(wanted != "no_grad"):
        loss = linear_cross_entropy(hidden, weight, labels, chunk=3)
        expected = linear_cross_entropy_reference(hidden, weight, labels)
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == (wanted in ("hidden", "weight"))
    if loss.requires_grad:
        leaf = hidden if wanted == "hidden" else weight
        (found,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(found, torch.autograd.grad(expected, leaf)[0])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("function", [linear_cross_entropy, linear_cross_entropy_reference])
def test_gradients_are_the_derivative(function: Any, softcap: float | None) -> None:
    hidden, weight, labels = case(5, 3, 7, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: function(h, w, labels, softcap=softcap, z_loss=0.1),
        (hidden.requires_grad_(), weight.requires_grad_()),
    )


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1]))
    assert loss.item() == 20_000.0
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[0.0], [2.0]]


def test_no_targets_is_a_loss_of_zero_with_zero_gradients() -> None:
    hidden, weight, labels = case(6, 3, 5, torch.float32, ignored=1.0)
    loss, *found = with_gradients(linear_cross_entropy, hidden, weight, labels)
    assert loss.item() == 0.0
    assert not any(g.any() for g in found)


class Allocations(TorchDispatchMode):
    """The largest number of elements of any tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_logits_of_all_tokens_never_exist(dtype: torch.dtype, softcap: float | None) -> None:
    tokens, hidden_size, vocabulary, chunk = 600, 8, 500, 64
    hidden, weight, labels = case(tokens, hidden_size, vocabulary, dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    with Allocations() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk=chunk, softcap=softcap).backward()
    assert seen.largest == chunk * vocabulary
    with Allocations() as seen:
        linear_cross_entropy_reference(hidden, weight, labels, softcap=softcap)
    assert seen.largest >= tokens * vocabulary  # the measure does see whole logits
