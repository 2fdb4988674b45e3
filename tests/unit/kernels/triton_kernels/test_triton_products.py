"""Triton's products and loss in its interpreter (nothing ran on a GPU), against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from triton_cases import FORMATS, assert_within, few, normal, steps, strided

Call = Callable[..., Any]
SIZES = st.sampled_from([1, 31, 64, 130])


@few
@given(rows=SIZES, depth=SIZES, columns=SIZES, dtype=FORMATS, turned=st.booleans())
def test_matmul(
    interpreter: Call, rows: int, depth: int, columns: int, dtype: torch.dtype, turned: bool
) -> None:
    a = strided(normal(rows, depth, seed=1, dtype=dtype))
    b = normal(columns, depth, seed=2, dtype=dtype).mT
    b = b if turned else strided(b)
    bias = normal(columns, seed=3, dtype=dtype)
    exact = a.double() @ b.double() + bias.double()
    assert_within(
        interpreter("matmul", "matmul", a, b, bias), exact, steps(dtype, 2), terms=depth**0.5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_one_product_wherever_it_lies(interpreter: Call, dtype: torch.dtype) -> None:
    a, b = normal(130, 100, seed=1, dtype=dtype), normal(100, 70, seed=2, dtype=dtype)
    together = interpreter("matmul", "matmul", a, b)
    for row in (0, 63, 129):
        one = slice(row, row + 1)
        assert torch.equal(interpreter("matmul", "matmul", a[one], b), together[one])


def test_products_of_nothing(interpreter: Call) -> None:
    assert interpreter("matmul", "matmul", torch.ones(0, 3), torch.ones(3, 2)).shape == (0, 2)
    nothing = interpreter("matmul", "matmul", torch.ones(2, 0), torch.ones(0, 2))
    assert torch.equal(nothing, torch.zeros(2, 2))


@few
@given(rows=SIZES, inputs=SIZES, outputs=SIZES, dtype=FORMATS, biased=st.booleans())
def test_int8_linear(
    interpreter: Call, rows: int, inputs: int, outputs: int, dtype: torch.dtype, biased: bool
) -> None:
    x = strided(normal(rows, inputs, seed=1, dtype=dtype))
    weight = (normal(outputs, inputs, seed=2) * 40).clamp(-127, 127).to(torch.int8)
    scale = normal(outputs, seed=3).abs().float() / 40
    bias = normal(outputs, seed=4, dtype=dtype) if biased else None
    y = interpreter("int8_linear", "int8_linear", x, weight, scale, bias)
    exact = x.double() @ (weight.double() * scale.double()[:, None]).mT
    exact = exact if bias is None else exact + bias.double()
    assert_within(y, exact, steps(dtype, 2), terms=inputs**0.5)
    assert torch.equal(
        interpreter("int8_linear", "int8_linear", x[-1:], weight, scale, bias), y[-1:]
    )


@few
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 5, 64, 70]), min_size=1, max_size=4),
    inputs=SIZES,
    outputs=SIZES,
    dtype=FORMATS,
    turned=st.booleans(),
)
def test_grouped_products(
    interpreter: Call,
    counts: list[int],
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    turned: bool,
) -> None:
    rows = sum(counts)
    x = strided(normal(rows, inputs, seed=1, dtype=dtype))
    weight = normal(len(counts), outputs, inputs, seed=2, dtype=dtype)
    weight = weight.mT.contiguous().mT if turned else weight
    grad = normal(rows, outputs, seed=3, dtype=dtype)
    table = torch.tensor(counts)
    parts = list(zip(x.double().split(counts), grad.double().split(counts), strict=True))
    y = interpreter("grouped_linear", "grouped_multiply", x, weight, table)
    exact = torch.cat([p @ w.double().mT for (p, _), w in zip(parts, weight, strict=True)])
    assert_within(y, exact, steps(dtype, 2), terms=inputs**0.5)
    total = interpreter("grouped_linear", "grouped_outer", grad, x, table)
    assert_within(
        total, torch.stack([g.mT @ p for p, g in parts]), steps(dtype, 2), terms=max(counts) ** 0.5
    )
    if rows:  # a row's product does not know how many rows its matrix has
        matrix = max(i for i, count in enumerate(counts) if count)
        alone = torch.eye(len(counts), dtype=torch.int64)[matrix]
        last = interpreter("grouped_linear", "grouped_multiply", x[-1:], weight, alone)
        assert torch.equal(last, y[-1:])


def exact_losses(
    logits: torch.Tensor, labels: torch.Tensor, softcap: float, z_loss: float, smoothing: float
) -> torch.Tensor:
    """Each row's loss, by differentiable operators."""
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    return loss + z_loss * z.logsumexp(-1).square() * (labels != -100)


@few
@given(
    words=st.sampled_from([2, 100, 4096, 4100]),
    softcap=st.sampled_from([0.0, 3.0]),
    z_loss=st.sampled_from([0.0, 0.01]),
    smoothing=st.sampled_from([0.0, 0.1]),
    kind=st.sampled_from([torch.int64, torch.int32]),
)
def test_cross_entropy(
    interpreter: Call,
    words: int,
    softcap: float,
    z_loss: float,
    smoothing: float,
    kind: torch.dtype,
) -> None:
    logits = strided(normal(4, words, seed=1, dtype=torch.float32) * 4)
    labels = torch.tensor([0, words - 1, -100, words // 2])
    exact = logits.double().requires_grad_()
    expected = exact_losses(exact, labels, softcap, z_loss, smoothing)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    losses = interpreter(
        "cross_entropy", "cross_entropy_slope_", logits, labels.to(kind), softcap, z_loss, smoothing
    )
    assert_within(losses, expected.detach(), 8)
    assert_within(logits, slope, 16)
    assert not logits[2].any()


def test_cross_entropy_of_far_logits_and_foreign_labels(interpreter: Call) -> None:
    logits = torch.tensor([[1e4, -1e4, float("-inf")]] * 3)
    labels = torch.tensor([0, 1, 7])
    losses = interpreter("cross_entropy", "cross_entropy_slope_", logits, labels, 0.0, 0.0, 0.0)
    assert losses[:2].tolist() == [0.0, 2e4] and losses[2].isnan()
    assert torch.equal(logits[:2], torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0]]))


@few
@given(cut=st.sampled_from([0, 1, 30, 4099]), softcap=st.sampled_from([0.0, 3.0]))
def test_a_softmax_in_two_parts(interpreter: Call, cut: int, softcap: float) -> None:
    logits = strided(normal(4, 4100, seed=1, dtype=torch.float32) * 4)
    labels = torch.tensor([0, 4099, -100, 20])
    exact = logits.double().requires_grad_()
    (slope,) = torch.autograd.grad(exact_losses(exact, labels, softcap, 0.01, 0.0).sum(), exact)
    parts = logits[:, :cut], logits[:, cut:]
    own = labels.where(labels < cut, -100), (labels - cut).where(labels >= cut, -100)
    first, second = (
        interpreter("head_part", "part_sums_", x, y, softcap)
        for x, y in zip(parts, own, strict=True)
    )
    largest = torch.maximum(first[0], second[0])
    total = sum(part[1] * (part[0] - largest).exp() for part in (first, second))
    rise = torch.where(labels == -100, 0.0, 1 + 0.02 * (largest + total.log()))
    for x, y in zip(parts, own, strict=True):
        interpreter("head_part", "part_slopes_", x, y, softcap, largest, total, rise)
    assert_within(logits, slope, 32)
    assert not logits[2].any()
    capped = softcap * torch.tanh(exact / softcap) if softcap else exact
    chosen = capped.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
    assert_within(first[2] + second[2], chosen.detach(), 4)


@few
@given(
    words=st.sampled_from([2, 100, 4100]),
    softcap=st.sampled_from([0.0, 3.0]),
    dtype=FORMATS,
)
def test_log_probs(interpreter: Call, words: int, softcap: float, dtype: torch.dtype) -> None:
    logits = strided(normal(4, words, seed=1, dtype=dtype) * 4)
    logits[1, 0] = 0.0 if softcap else float("-inf")
    labels = torch.tensor([0, words - 1, -100, words // 2])
    z = softcap * torch.tanh(logits.double() / softcap) if softcap else logits.double()
    spread = z.log_softmax(-1)
    expected = spread.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
    chosen, entropy = interpreter("cross_entropy", "log_probs", logits, labels, softcap)
    assert_within(chosen, expected, 8)
    assert_within(entropy, -(spread.exp() * spread.nan_to_num(neginf=0.0)).sum(-1), 16, terms=1)
    again, alone = interpreter("cross_entropy", "log_probs", logits[1:2], labels[1:2], softcap)
    assert torch.equal(again, chosen[1:2]) and torch.equal(alone, entropy[1:2])
