"""Log-probabilities and entropies by chunks against the whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, held, normal
from native_cases import poisoned, threads
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.kernels import dispatch
from fivefold.kernels import log_probs as module
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.log_probs import linear_log_probs, linear_log_probs_reference

FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def case(
    tokens: int, size: int, words: int, dtype: torch.dtype, ignored: float = 0.3
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(9)
    labels = torch.randint(0, words, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    hidden = normal(tokens, size, seed=1) / size**0.5
    return hidden.to(dtype), 2 * normal(words, size, seed=2, dtype=dtype), labels


def run(function: Any, hidden: Tensor, weight: Tensor, labels: Tensor, **settings: Any) -> Any:
    """Both numbers, and the gradients of a loss that uses both."""
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    found, entropies = function(*leaves, labels, **settings)
    ramp = torch.linspace(-1, 2, len(labels), dtype=torch.float64).to(found.dtype)
    loss = (found * ramp).sum() + (entropies.square() * ramp.flip(0)).sum()
    return found.detach(), entropies.detach(), *torch.autograd.grad(loss, leaves)


@held
@given(
    st.tuples(st.integers(1, 20), st.integers(1, 16), st.integers(1, 70)),
    st.sampled_from([None, 3.0]),
    st.integers(1, 25),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([torch.float64, *FORMATS]),
)
def test_equals_the_whole_logits(
    shape: tuple[int, int, int],
    softcap: float | None,
    chunk: int,
    ignored: float,
    dtype: torch.dtype,
) -> None:
    hidden, weight, labels = case(*shape, dtype, ignored)
    with poisoned():
        found = run(linear_log_probs, hidden, weight, labels, softcap=softcap, chunk=chunk)
    exact = run(linear_log_probs_reference, *double(hidden, weight), labels, softcap=softcap)
    for actual, expected in zip(found, exact, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        elif actual.dtype == torch.float32:
            assert_within(actual, expected, 40, terms=10)
        else:
            # Slopes of a few units are rounded, and then their sums.
            assert_within(actual, expected, 1.0, terms=8)


def test_only_one_of_the_two_is_used() -> None:
    hidden, weight, labels = case(7, 4, 13, torch.float32)
    hidden.requires_grad_()
    for which in (0, 1):
        (found,) = torch.autograd.grad(
            linear_log_probs(hidden, weight, labels, chunk=3)[which].sum(), hidden
        )
        exact = linear_log_probs_reference(hidden, weight, labels)[which].sum()
        torch.testing.assert_close(found, torch.autograd.grad(exact, hidden)[0])


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_are_the_derivative(softcap: float | None) -> None:
    hidden, weight, labels = case(5, 3, 7, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, labels, softcap=softcap, chunk=2),
        (hidden.requires_grad_(), weight.requires_grad_()),
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_deterministic_rows_do_not_depend_on_batch_chunk_or_threads(dtype: torch.dtype) -> None:
    hidden, weight, labels = case(40, 300, 1111, dtype)

    def numbers(rows: int, chunk: int, count: int = 1) -> tuple[Tensor, ...]:
        # The gradient of a row depends on its own upstream gradients, which are ones here.
        leaf = hidden[:rows].clone().requires_grad_()
        with threads(count):
            found, entropies = linear_log_probs(leaf, weight, labels[:rows], chunk=chunk)
            (grad,) = torch.autograd.grad(found.sum() + entropies.sum(), leaf)
        return found.detach(), entropies.detach(), grad

    with dispatch.deterministic():
        whole = numbers(40, 40)
        for rows, chunk, count in ((40, 40, 2), (40, 1, 1), (40, 7, 1), (13, 5, 2), (1, 1, 1)):
            found = numbers(rows, chunk, count)
            assert all(torch.equal(a, b[:rows]) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torch_knows_the_operators(dtype: torch.dtype) -> None:
    hidden, weight, labels = case(9, 6, 11, dtype)
    grads = (torch.rand(9, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2))
    torch.library.opcheck(
        torch.ops.fivefold.linear_log_probs_backward,
        (*grads, hidden, weight, labels, 5.0, 4, True, False),
    )
    torch.library.opcheck(
        torch.ops.fivefold.linear_log_probs,
        (hidden.requires_grad_(), weight.requires_grad_(), labels, None, 4),
    )


def test_compiled_and_checkpointed_it_is_the_same() -> None:
    inputs = case(9, 6, 11, torch.bfloat16)
    plain = run(linear_log_probs, *inputs, chunk=4)
    compiled = torch.compile(linear_log_probs, fullgraph=True, backend="aot_eager")

    def again(*arguments: Any, **settings: Any) -> Any:
        return checkpoint(linear_log_probs, *arguments, use_reentrant=False, **settings)

    for function in (compiled, again):
        found = run(function, *inputs, chunk=4)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_masked_words_have_no_part_in_the_entropy() -> None:
    logits = torch.zeros(2, 41)
    logits[:, 4:] = float("-inf")
    labels = torch.tensor([1, 3])
    for native in (True, False):
        function = module._log_probs_ if native else _by_torch
        found, entropies = function(logits.clone(), labels, None)
        torch.testing.assert_close(found, torch.full((2,), -torch.log(torch.tensor(4.0)).item()))
        torch.testing.assert_close(entropies, -found)
    slope = module._slopes_(logits, labels, None, (torch.ones(2),) * 2, torch.float32)
    torch.testing.assert_close(slope[0, :4], torch.tensor([-0.25, 0.75, -0.25, -0.25]))
    assert not slope[:, 4:].any()


def _by_torch(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    return tuple(x.float() for x in module._log_probs_(logits.double(), labels, softcap))  # type: ignore[return-value]


def test_a_label_beyond_the_vocabulary_is_named() -> None:
    hidden, weight, labels = case(3, 4, 5, torch.float32)
    with pytest.raises(KernelError, match="label 5 is not among 5 words"):
        linear_log_probs(hidden, weight, torch.full_like(labels, 5))
