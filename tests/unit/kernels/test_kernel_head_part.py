"""A head in parts, put together again in one process, against the whole head and against fp64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, held, normal
from native_cases import poisoned
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.cross_entropy import linear_cross_entropy_reference
from fivefold.kernels.head import IGNORE, wide
from fivefold.kernels.head_part import (
    CHOSEN,
    LARGEST,
    SUM,
    head_part_gradients_,
    head_part_sums_,
)


def in_parts(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    cuts: list[int],
    *,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of hidden, of the weight), the words divided at `cuts`; both in wide sums."""
    format = wide(hidden)
    own, logits, found = [], [], []
    for start, end in pairwise([0, *cuts, weight.shape[0]]):
        part, rows = weight[start:end], labels - start
        own.append(torch.where((rows >= 0) & (rows < end - start), rows, IGNORE))
        logits.append(torch.empty(hidden.shape[0], end - start, dtype=format))
        found.append(head_part_sums_(hidden, part, own[-1], softcap, logits[-1]))
    parts = torch.stack(found)
    largest = parts[:, LARGEST].amax(0)
    sums = (parts[:, SUM] * (parts[:, LARGEST] - largest).exp()).sum(0)
    everywhere = torch.stack((largest, sums, parts[:, CHOSEN].sum(0)))
    normaliser = everywhere[SUM].log() + largest
    losses = normaliser - everywhere[CHOSEN] + z_loss * normaliser.square()
    rise = torch.where(labels == IGNORE, 0.0, 1 + 2 * z_loss * normaliser)
    grad_hidden, grad_weight = torch.zeros(hidden.shape, dtype=format), []
    for (start, end), mine, raw in zip(
        pairwise([0, *cuts, weight.shape[0]]), own, logits, strict=True
    ):
        share = torch.empty_like(hidden)
        total = torch.zeros(end - start, hidden.shape[1], dtype=format)
        head_part_gradients_(
            hidden, weight[start:end], mine, softcap, raw, everywhere, rise, share, total
        )
        grad_hidden += share
        grad_weight.append(total)
    return losses[labels != IGNORE].sum(), grad_hidden, torch.cat(grad_weight)


def exact(
    hidden: Tensor, weight: Tensor, labels: Tensor, **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the whole head in fp64."""
    operands = tuple(x.requires_grad_() for x in double(hidden, weight))
    loss = linear_cross_entropy_reference(*operands, labels, **settings)
    return loss.detach(), *torch.autograd.grad(loss, operands)


def drawn(tokens: int, size: int, words: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + words)
    labels = torch.randint(0, words, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = IGNORE
    return (
        normal(tokens, size, seed=1, dtype=dtype),
        normal(words, size, seed=2, dtype=dtype),
        labels,
    )


settings_drawn = st.fixed_dictionaries(
    {"softcap": st.sampled_from([None, 3.0]), "z_loss": st.sampled_from([0.0, 1e-2])}
)


@held
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 90)),
    st.lists(st.integers(0, 90), max_size=3),
    settings_drawn,
    st.sampled_from(["native", "torch"]),
)
def test_parts_give_what_the_whole_gives(
    shape: tuple[int, int, int], cuts: list[int], settings: dict[str, Any], computes: Any
) -> None:
    """Parts without a word among them."""
    places = sorted(min(cut, shape[2]) for cut in cuts)
    for dtype, steps in ((torch.float64, 0), (torch.float32, 60)):
        inputs = drawn(*shape, dtype)
        with dispatch.only(computes), poisoned():
            found = in_parts(*inputs, places, **settings)
        for actual, expected in zip(found, exact(*inputs, **settings), strict=True):
            if dtype == torch.float64:
                torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
            else:
                assert_within(actual, expected, steps, terms=4.0 * shape[0])


@pytest.mark.parametrize("computes", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_formats(dtype: torch.dtype, computes: Any) -> None:
    hidden, weight, labels = drawn(33, 32, 90, dtype)
    settings: dict[str, Any] = {"softcap": 10.0, "z_loss": 1e-3}
    with dispatch.only(computes):
        loss, grad_hidden, grad_weight = in_parts(hidden / 4, weight, labels, [40, 41], **settings)
    expected = exact(hidden / 4, weight, labels, **settings)
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert_within(grad_hidden.to(dtype), expected[1], 2)
    assert_within(grad_weight.to(dtype), expected[2], 1.5)  # slopes are rounded, then their sums


@pytest.mark.parametrize("computes", ["native", "torch"])
def test_tokens_without_a_target_do_not_matter(computes: Any) -> None:
    """Whatever their logits are, of a word that was ruled out or not numbers at all."""
    hidden, weight, _ = drawn(3, 4, 41, torch.float32)
    labels, mine = torch.tensor([50, IGNORE, 2]), torch.tensor([IGNORE, IGNORE, 2])
    logits, sums = torch.empty(3, 41), torch.zeros(41, 4)
    grad_hidden = torch.full((3, 4), float("nan"))
    with dispatch.only(computes):
        found = head_part_sums_(hidden, weight, mine, None, logits)
        logits[1] = float("nan")
        logits[0, 3] = float("-inf")
        rise = (labels != IGNORE).float()
        head_part_gradients_(
            hidden, weight, mine, None, logits, found, rise, grad_hidden, sums
        )  # fmt: skip
    torch.testing.assert_close(found[CHOSEN], torch.stack((*torch.zeros(2), hidden[2] @ weight[2])))
    assert not grad_hidden[1].any()
    assert sums.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torch_knows_both_operators(dtype: torch.dtype) -> None:
    hidden, weight, labels = drawn(5, 6, 11, dtype)
    logits = torch.empty(5, 11, dtype=wide(hidden))
    torch.library.opcheck(torch.ops.fivefold.head_part_sums_, (hidden, weight, labels, 3.0, logits))
    everywhere = head_part_sums_(hidden, weight, labels, 3.0, logits)
    rise, sums = torch.ones(5, dtype=wide(hidden)), torch.zeros(11, 6, dtype=wide(hidden))
    torch.library.opcheck(
        torch.ops.fivefold.head_part_gradients_,
        (hidden, weight, labels, 3.0, logits, everywhere, rise, torch.zeros_like(hidden), sums),
    )


def test_a_label_of_other_words_is_named() -> None:
    hidden, weight, _ = drawn(2, 4, 9, torch.float32)
    with pytest.raises(KernelError, match="label 9 is not among 9 words"):
        head_part_sums_(hidden, weight, torch.tensor([0, 9]), None, torch.empty(2, 9))
