"""The operators where parameters are gathered by FSDP2, or operands are shards of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist.harness import Workers
from tests.dist.kernel_cases import (
    NAMES,
    attention_of_a_shard_by_hand,
    decoder_under_fsdp,
    everything_under_fsdp,
    on_shards,
)

GetWorkers = Callable[[int], Workers]
# Of a gradient's largest element: sums over ranks come in another order, in bf16 rounded apart.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "mixed"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_a_decoder_under_fsdp(workers: GetWorkers, dtype: str, mixed: bool, tied: bool) -> None:
    """Losses in the same bits as in one process; gradients up to the order of sums over ranks."""
    assert_same_losses_and_gradients(workers(2).run(decoder_under_fsdp, dtype, tied, mixed), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_operator_under_fsdp(workers: GetWorkers, dtype: str) -> None:
    assert_same_losses_and_gradients(workers(2).run(everything_under_fsdp, dtype), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", NAMES)
def test_shards_are_parts_of_the_whole(workers: GetWorkers, name: str, dtype: str) -> None:
    """Bits are those of one call but where ranks' parts are added up."""
    for found in workers(2).run(on_shards, name, dtype):
        results_summed, gradients_summed = found["summed"]
        for actual, expected in zip(*found["results"], strict=True):
            assert_equal(actual, expected, TOLERANCE[dtype] if results_summed else 0.0)
        for actual, expected, summed in zip(*found["gradients"], gradients_summed, strict=True):
            # A bias's is a sum by torch, which takes another order for fewer columns.
            apart = summed or (actual.ndim == 1 and "norm" not in name)
            assert_equal(actual, expected, TOLERANCE[dtype] if apart else 0.0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_decoders_attention_over_shards_of_heads(workers: GetWorkers, dtype: str) -> None:
    for actual, expected in workers(2).run(attention_of_a_shard_by_hand, dtype):
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)


def assert_same_losses_and_gradients(ranks: list[dict[str, Any]], dtype: str) -> None:
    for found in ranks:
        for actual, expected in zip(*found["losses"], strict=True):
            assert torch.equal(actual, expected)
        actual, expected = found["gradients"]
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            assert_equal(actual[name], gradient, TOLERANCE[dtype])


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if tolerance == 0.0:
        assert torch.equal(actual, expected)
        return
    worst = (actual.double() - expected.double()).abs().max()
    assert worst <= tolerance * expected.double().abs().max()
