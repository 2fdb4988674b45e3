"""Orders of sums and of roundings that the kernels promise, where other tests would not notice."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_within, normal

from fivefold.kernels import dispatch
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.kernels.gated import gated
from fivefold.kernels.linear import linear
from fivefold.kernels.packed_linear import pack_int8, pack_weight, packed_linear, quantize_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rows", [1, 2, 7, 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_inputs_are_whole_chains(dtype: torch.dtype, rows: int) -> None:
    """More inputs than `multiply` packs at a time, where the packed layer has no such blocks."""
    x, weight = normal(rows, 2311, seed=1, dtype=dtype), normal(19, 2311, seed=2, dtype=dtype)
    with dispatch.deterministic():
        assert torch.equal(packed_linear(x, pack_weight(weight)), linear(x, weight))


@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_after_the_scale_of_int8(dtype: torch.dtype, rows: int) -> None:
    x, weight = normal(rows, 40, seed=1, dtype=dtype), normal(37, 40, seed=2, dtype=dtype)
    bias = 10 * normal(37, seed=3, dtype=torch.float32)
    values, scale = quantize_int8(weight)
    exact = x.double() @ (values.double() * scale.double().unsqueeze(1)).mT + bias.double()
    found = packed_linear(x, pack_int8(weight, dtype), bias)
    assert_within(found, exact, 20 if dtype == torch.float32 else 1)


def test_far_below_zero_a_gate_does_not_cancel() -> None:
    """e^x, not 1 minus nearly 1: the error is of the small result, not of the largest."""
    gate = torch.linspace(-60, -1, 77).unsqueeze(0)
    found = gated(gate, torch.ones_like(gate), "silu")
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0.0)


def test_a_maximum_that_rises_along_the_vocabulary() -> None:
    """Sums so far are brought to each new largest logit, block after block."""
    weight = torch.linspace(-30, 30, 333).unsqueeze(1)
    labels = torch.tensor([5, 330])
    found = linear_cross_entropy(torch.ones(2, 1), weight, labels)
    logits = weight.double().T.expand(2, -1)
    exact = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0.0)
