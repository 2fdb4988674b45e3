"""Chunked cross-entropy against the whole logits, and what it never allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, held, normal
from native_cases import poisoned, threads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fivefold.kernels import cross_entropy as module
from fivefold.kernels import dispatch, head
from fivefold.kernels.cpu.library import KernelError
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
    {
        "softcap": st.sampled_from([None, 3.0]),
        "z_loss": st.sampled_from([0.0, 1e-2]),
        "label_smoothing": st.sampled_from([0.0, 0.1]),
    }
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


@pytest.mark.parametrize("products", ["own", "torch", "through-fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 10.0])
def test_low_formats_equal_fp64(
    dtype: torch.dtype, products: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied = torch.float32 if products == "through-fp32" else dtype
    monkeypatch.setattr(head, "_format", lambda *_: (multiplied, products == "own"))
    hidden, weight, labels = case(70, 32, 90, dtype)
    hidden = hidden / 4  # logits of a few units, as a model's
    settings = {"softcap": softcap, "label_smoothing": 0.1}
    with poisoned():
        loss, *found = with_gradients(
            linear_cross_entropy, hidden, weight, labels, chunk=16, **settings
        )
    exact_loss, *exact = with_gradients(
        linear_cross_entropy_reference, *double(hidden, weight), labels, **settings
    )
    assert loss.dtype == torch.float32
    # torch's product rounds the logits, half a step of about 4, over 49 targets; ours does not.
    allowed = 2e-3 if products == "torch" else 1e-5
    assert loss.item() == pytest.approx(exact_loss.item(), rel=allowed)
    for actual, expected in zip(found, exact, strict=True):
        assert actual.dtype == dtype
        # Rounded when stored and again when scaled; then the slopes, then the logits as well.
        assert_within(actual, expected, {"own": 1.4, "torch": 4, "through-fp32": 1.1}[products])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_torch(dtype: torch.dtype) -> None:
    inputs = case(70, 32, 90, dtype)
    found = with_gradients(linear_cross_entropy, inputs[0] / 4, *inputs[1:], chunk=16)

    def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.mT, labels, reduction="sum")

    torchs = with_gradients(whole, inputs[0] / 4, *inputs[1:])
    exact = with_gradients(
        linear_cross_entropy_reference, *double(inputs[0] / 4, inputs[1]), inputs[2]
    )
    for actual, other, expected in zip(found, torchs, exact, strict=True):
        mine, theirs = ((x.double() - expected).square().mean() for x in (actual, other))
        assert mine <= (2 if dtype == torch.float32 else 1) * theirs + 1e-12


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
        lambda h, w: function(h, w, labels, softcap=softcap, z_loss=0.1, label_smoothing=0.2),
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
    """The largest number of bytes of any tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_logits_of_all_tokens_never_exist(dtype: torch.dtype, softcap: float | None) -> None:
    tokens, hidden_size, vocabulary, chunk = 600, 8, 500, 64
    hidden, weight, labels = case(tokens, hidden_size, vocabulary, dtype)
    with Allocations() as seen:  # of what the operator does inside
        module._forward(hidden, weight, labels, softcap, 0.0, 0.0, chunk, True, True)
    assert seen.largest == chunk * vocabulary * 4
    with Allocations() as again:  # and of what whoever counts memory outside sees
        linear_cross_entropy(
            hidden.requires_grad_(), weight.requires_grad_(), labels, chunk=chunk, softcap=softcap
        ).backward()
    assert again.largest == seen.largest
    with Allocations() as seen:
        linear_cross_entropy_reference(hidden, weight, labels, softcap=softcap)
    assert seen.largest >= tokens * vocabulary * 4  # the measure does see whole logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scaled_where_they_lie_unless_they_are_asked_for_again(
    dtype: torch.dtype,
) -> None:
    hidden, weight, labels = case(20, 40, 50, dtype)
    operands = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(*operands, labels, chunk=7)
    assert loss.grad_fn is not None
    kept = {t.data_ptr() for t in loss.grad_fn.saved_tensors}  # type: ignore[attr-defined]
    scale = torch.tensor(1.7)
    first = torch.autograd.grad(loss, operands, scale, retain_graph=True)
    last = torch.autograd.grad(loss, operands, scale)
    assert kept.isdisjoint(t.data_ptr() for t in first)
    assert kept == {t.data_ptr() for t in last}
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))


def test_a_gradient_does_not_keep_the_larger_buffer_that_it_was_made_in() -> None:
    hidden, weight, labels = case(20, 8, 50, torch.bfloat16)
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, labels, chunk=20).backward()
    assert weight.grad is not None
    assert weight.grad.untyped_storage().nbytes() == weight.nbytes


def test_gradients_of_several_scales_at_once() -> None:
    hidden, weight, labels = case(9, 8, 12, torch.float32)
    loss = linear_cross_entropy(hidden, weight.requires_grad_(), labels)
    (once,) = torch.autograd.grad(loss, weight, retain_graph=True)
    scales = torch.tensor([1.0, -2.0])
    (found,) = torch.autograd.grad(loss, weight, scales, is_grads_batched=True)
    torch.testing.assert_close(found, torch.stack((once, -2 * once)))


EVERYTHING = {"softcap": 5.0, "z_loss": 1e-3, "label_smoothing": 0.1}
deterministic = pytest.mark.parametrize("policy", [False, True], ids=["fast", "deterministic"])
formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@formats
@deterministic
@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["plain", "everything"])
def test_native_equals_torch_operators(
    dtype: torch.dtype, policy: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = case(33, 24, 301, dtype)
    with dispatch.deterministic(policy), poisoned():
        assert dispatch.is_native("cross_entropy", "cpu", torch.float32)
        found = with_gradients(linear_cross_entropy, *inputs, chunk=9, **settings)
    monkeypatch.setattr(dispatch, "is_native", lambda *_: False)
    plain = with_gradients(linear_cross_entropy, *inputs, chunk=9, **settings)
    for actual, expected in zip(found, plain, strict=True):
        assert_within(actual, expected, 60 if dtype == torch.float32 else 2)


@formats
def test_deterministic_rows_do_not_depend_on_batch_chunk_or_threads(dtype: torch.dtype) -> None:
    hidden, weight, labels = case(40, 300, 1111, dtype)

    def slopes(rows: int, chunk: int, count: int = 1) -> Tensor:
        with threads(count):
            return with_gradients(
                linear_cross_entropy,
                hidden[:rows],
                weight,
                labels[:rows],
                chunk=chunk,
                **EVERYTHING,
            )[1]

    with dispatch.deterministic():
        whole = slopes(40, 40)
        assert torch.equal(slopes(40, 40, 2), whole)
        for rows, chunk in ((40, 1), (40, 7), (40, 512), (13, 5), (1, 1)):
            assert torch.equal(slopes(rows, chunk), whole[:rows])


@formats
def test_same_bits_on_one_and_two_threads(dtype: torch.dtype) -> None:
    inputs = case(40, 24, 1111, dtype)
    with dispatch.deterministic():
        with threads(1):
            one = with_gradients(linear_cross_entropy, *inputs, chunk=32)
        with threads(2):
            two = with_gradients(linear_cross_entropy, *inputs, chunk=32)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torch_knows_the_operator(dtype: torch.dtype) -> None:
    hidden, weight, labels = case(9, 6, 11, dtype)
    for wants in ((True, True), (True, False), (False, False)):
        arguments = (
            hidden.clone().requires_grad_(wants[0]), weight.clone().requires_grad_(wants[1]), labels,
            None, 1e-3, 0.1, 4, *wants,
        )  # fmt: skip
        torch.library.opcheck(torch.ops.fivefold.linear_cross_entropy, arguments)


def test_compiled_and_checkpointed_it_is_the_same() -> None:
    inputs = case(9, 6, 11, torch.bfloat16)
    plain = with_gradients(linear_cross_entropy, *inputs, chunk=4)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")

    def again(*arguments: Any, **settings: Any) -> Any:
        return checkpoint(linear_cross_entropy, *arguments, use_reentrant=False, **settings)

    for function in (compiled, again):
        found = with_gradients(function, *inputs, chunk=4)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_masked_words_and_poisoned_rows_without_a_label_do_not_matter() -> None:
    logits = normal(3, 41, seed=1, dtype=torch.float32)
    logits[:, ::2] = float("-inf")
    labels = torch.tensor([1, -100, 39])
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    softmax = logits.softmax(-1)
    logits[1] = float("nan")
    losses, slope = module._slopes_(logits, labels, None, 0.0, 0.0, torch.float32)
    torch.testing.assert_close(losses, expected)
    softmax[0, 1] -= 1
    softmax[2, 39] -= 1
    torch.testing.assert_close(slope[[0, 2]], softmax[[0, 2]])
    assert not slope[1].any()


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "label": ({"labels": torch.tensor([0, 5])}, "label 5 is not among 5 words"),
    "negative": ({"labels": torch.tensor([-1, 0])}, "label -1 is not among 5 words"),
    "count": ({"labels": torch.tensor([0])}, r"not \[2, 3\], \[5, 3\] and \[1\] torch.int64"),
    "int32": ({"labels": torch.tensor([0, 1], dtype=torch.int32)}, "torch.int32"),
    "weight": ({"weight": torch.ones(5, 4)}, r"\[5, 4\]"),
    "chunk": ({"chunk": 0}, "at least one token, not 0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_operands_are_named(name: str) -> None:
    changed, message = ERRORS[name]
    given: dict[str, Any] = {
        "hidden": torch.ones(2, 3), "weight": torch.ones(5, 3), "labels": torch.tensor([0, 1]),
        **changed,
    }  # fmt: skip
    with pytest.raises(KernelError, match=message) as caught:
        linear_cross_entropy(**given)
    assert "\n" not in str(caught.value)
