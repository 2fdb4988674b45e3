"""Blocks, and their union: against attention over all keys at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.axes.cp import block
from fivefold.axes.cp.block import Rule, plain_backward, plain_forward
from fivefold.axes.cp.flash import (
    cuda_backward,
    cuda_forward,
    flash_backward,
    flash_covers,
    flash_forward,
)
from fivefold.axes.cp.message import heads_first, pack, unpack
from fivefold.axes.cp.online import OnlineBackward, OnlineForward
from fivefold.axes.cp.sight import Sight
from fivefold.axes.cp.split import ContextSplit
from fivefold.kernels.attention import attention_reference

FP64 = 1e-12


def operands(
    queries: int, keys: int, key_dim: int = 8, value_dim: int = 8, dtype: Any = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 4, queries, key_dim), (2, 2, keys, key_dim), (2, 2, keys, value_dim))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    query, key, value = (x.to(dtype) for x in made)
    return query, key, value


def some_mask(queries: int, keys: int) -> Tensor:
    mask = torch.rand(2, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[0, 1] = False  # a query that sees nothing here
    return mask


def gradients(
    backward: Any, operands: Any, mask: Tensor | None, causal: bool, rule: Rule
) -> tuple[Tensor, ...]:
    result, total = plain_forward(*operands, mask, causal, rule)
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(9)).to(result)
    total = total.masked_fill(total == float("-inf"), 3.0)  # of keys in other blocks
    return backward(grad, *operands, result, total, mask, causal, rule)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 8), (12, 8), (6, 10)])
@pytest.mark.parametrize("masked", ["all", "causal", "mask"])
def test_flash_and_plain_blocks_are_the_same(key_dim: int, value_dim: int, masked: str) -> None:
    found = operands(33, 33, key_dim, value_dim)
    mask = some_mask(33, 33) if masked == "mask" else None
    rule, causal = Rule(0.7), masked == "causal"
    for ours, theirs in zip(
        flash_forward(*found, mask, causal, rule),
        plain_forward(*found, mask, causal, rule),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=FP64, atol=FP64)
    for ours, theirs in zip(
        gradients(flash_backward, found, mask, causal, rule),
        gradients(plain_backward, found, mask, causal, rule),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=FP64, atol=FP64)


def test_the_cuda_kernels_take_these_arguments() -> None:
    """Shapes alone, on a device without values."""
    low = operands(64, 32, 16, 16, torch.bfloat16)
    query, key, value = (x.to("meta") for x in low)
    result, total = cuda_forward(query, key, value, False, 0.5)
    assert result.shape == query.shape and total.shape == query.shape[:-1]
    assert total.dtype == torch.float32
    found = cuda_backward(result, query, key, value, result, total, False, 0.5)
    assert [x.shape for x in found] == [query.shape, key.shape, value.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (12, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_blocks(key_dim: int, value_dim: int, causal: bool) -> None:
    low: Any = tuple(x.cuda() for x in operands(64, 64, key_dim, value_dim, torch.bfloat16))
    assert flash_covers(low[0], low[2], None, Rule(0.2))
    pairs = [
        *zip(
            flash_forward(*low, None, causal, Rule(0.2)),
            plain_forward(*low, None, causal, Rule(0.2)),
            strict=True,
        ),
        *zip(
            gradients(flash_backward, low, None, causal, Rule(0.2)),
            gradients(plain_backward, low, None, causal, Rule(0.2)),
            strict=True,
        ),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("masked", [False, True])
def test_flash_blocks_of_low_precision(masked: bool) -> None:
    wide = operands(40, 24, 16, 16)
    low: Any = tuple(x.bfloat16() for x in wide)
    mask = some_mask(40, 24) if masked else None
    rule = Rule(0.2)
    exact: Any = tuple(x.double() for x in low)
    for ours, theirs in zip(
        flash_forward(*low, mask, False, rule),
        plain_forward(*exact, mask, False, rule),
        strict=True,
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_plain_block_is_attention(softcap: float | None) -> None:
    query, key, value = operands(9, 20)
    mask = some_mask(9, 20)
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (query, key, value)]
    wanted = attention_reference(*leaves, mask=mask, causal=False, scale=0.7, softcap=softcap)
    rule = Rule(0.7, softcap=softcap)
    result, total = plain_forward(query, key, value, mask, False, rule)
    torch.testing.assert_close(result.transpose(1, 2), wanted, rtol=FP64, atol=FP64)
    assert (total[0, :, 1] == float("-inf")).all()
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)).double()
    wanted.backward(grad)
    total = total.masked_fill(total == float("-inf"), 0.0)
    found = plain_backward(
        grad.transpose(1, 2), query, key, value, result, total, mask, False, rule
    )
    for ours, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(ours.transpose(1, 2), leaf.grad, rtol=FP64, atol=FP64)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    found, rule = operands(21, 21), Rule(0.7, softcap=3.0)
    mask = None if causal else some_mask(21, 21)
    whole = [*plain_forward(*found, mask, causal, rule)]
    whole += gradients(plain_backward, found, mask, causal, rule)
    monkeypatch.setattr(block, "TILE", 2 * 4 * 21 * 4)  # four queries at a time
    tiled = [*plain_forward(*found, mask, causal, rule)]
    tiled += gradients(plain_backward, found, mask, causal, rule)
    for ours, theirs in zip(tiled, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=FP64, atol=FP64)


def test_what_flash_covers() -> None:
    query, _, value = operands(4, 4)
    assert flash_covers(query, value, some_mask(4, 4), Rule(1.0))
    assert not flash_covers(query, value, None, Rule(1.0, softcap=2.0))
    assert not flash_covers(query.to("meta"), value, None, Rule(1.0))


def test_not_a_number_stays() -> None:
    """A broken query must not come out as zeros."""
    query, key, value = operands(4, 4)
    query[0, 0, 0, 0] = float("nan")
    assert plain_forward(query, key, value, None, True, Rule(1.0))[0][0, 0, 0].isnan().all()


def test_messages_hold_keys_and_values() -> None:
    key, value = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 6)
    message = pack(key, value)
    assert message.shape == (5, 2, 3, 10) and message.is_contiguous()
    assert all(map(torch.equal, unpack(message, 4), (key, value)))
    assert all(
        map(torch.equal, heads_first(message, 4), (key.transpose(1, 2), value.transpose(1, 2)))
    )


def ring_of(ways: int, dtype: Any, scale: float, softcap: float | None) -> float:
    """Largest error of a ring's arithmetic in one process, relative to whole rows in fp64."""
    length, split = 256, ContextSplit(ways, 0)
    query, key, value = operands(length, length, 16, 16, dtype)
    runs = [split.runs(length, rank) for rank in range(ways)]
    cuts = [[slice(*run) for run in of_rank] for of_rank in runs]
    leaves = [x.double().transpose(1, 2).clone().requires_grad_() for x in (query, key, value)]
    wanted = attention_reference(*leaves, mask=None, causal=True, scale=scale, softcap=softcap)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    wanted.backward(grad.double())

    def part(x: Tensor, rank: int) -> Tensor:
        return torch.cat([x[:, :, cut] for cut in cuts[rank]], dim=2)

    worst = 0.0
    rule = Rule(scale, softcap=softcap)
    key_grad = [torch.zeros_like(part(key, rank)) for rank in range(ways)]
    value_grad = [torch.zeros_like(part(value, rank)) for rank in range(ways)]

    def note(ours: Tensor, theirs: Tensor | None, rank: int) -> None:
        nonlocal worst
        assert theirs is not None
        difference = ours.double() - part(theirs.transpose(1, 2), rank)
        worst = max(worst, float(difference.abs().max() / theirs.abs().max()))

    for rank in range(ways):
        sight = Sight(runs[rank], None)
        mine = part(query, rank)
        online = OnlineForward(mine, 16, sight, rule)
        hops = [(rank - hop) % ways for hop in range(ways)]
        for source in hops:
            online.add(part(key, source), part(value, source), runs[source])
        back = OnlineBackward(
            part(grad.transpose(1, 2), rank), mine, online.result, online.total, sight, rule
        )
        for source in hops:
            back.add(
                part(key, source), part(value, source), runs[source],
                key_grad[source], value_grad[source],
            )  # fmt: skip
        note(online.result, wanted.detach(), rank)
        note(back.query_grad, leaves[0].grad, rank)
    for rank in range(ways):
        note(key_grad[rank], leaves[1].grad, rank)
        note(value_grad[rank], leaves[2].grad, rank)
    return worst


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("scale", [0.25, 4.0])  # even weights, and a few keys that take all
def test_the_error_does_not_grow_with_the_ring(scale: float, softcap: float | None) -> None:
    alone = ring_of(1, torch.float32, scale, softcap)
    for ways in (2, 4, 8, 16):
        assert ring_of(ways, torch.float32, scale, softcap) < 1.25 * alone, ways
        assert ring_of(ways, torch.float64, scale, softcap) < 1e-12
