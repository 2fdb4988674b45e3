"""Orders of sums and of roundings that the kernels promise, where other tests would not notice."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_within, normal

from fivefold.kernels import dispatch
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
