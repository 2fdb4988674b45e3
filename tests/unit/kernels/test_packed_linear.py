"""Packed linear layers: the bits of unpacked ones, and int8 within its rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, held, normal

from fivefold.kernels import dispatch
from fivefold.kernels.cpu import packed as native
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.linear import linear
from fivefold.kernels.packed_linear import (
    pack_int8,
    pack_weight,
    packed_linear,
    packed_linear_reference,
    quantize_int8,
)

ALL = [torch.float32, torch.bfloat16, torch.float16]
sizes = {"m": st.integers(0, 70), "n": st.integers(1, 100), "k": st.sampled_from([1, 5, 64, 257])}


@held
@given(**sizes, dtype=st.sampled_from(ALL), biased=st.booleans())
def test_packed_equals_unpacked_bit_for_bit(
    m: int, n: int, k: int, dtype: torch.dtype, biased: bool
) -> None:
    x, weight = normal(m, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype)
    bias = normal(n, seed=3, dtype=torch.float32) if biased else None
    with dispatch.deterministic():
        assert torch.equal(packed_linear(x, pack_weight(weight), bias), linear(x, weight, bias))


@held
@given(**sizes, dtype=st.sampled_from(ALL))
def test_int8_is_the_product_with_the_rounded_weight(
    m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, weight = normal(m, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype)
    weight[0] = 0
    packed = pack_int8(weight, dtype)
    values, scale = quantize_int8(weight)
    exact = x.double() @ (values.double() * scale.double().unsqueeze(1)).mT
    found = packed_linear(x, packed)
    assert_within(found, exact, 20 if dtype == torch.float32 else 1)
    with dispatch.only("torch"):
        assert_within(packed_linear(x, pack_int8(weight, dtype)), exact, 20)
    half_a_step = scale.double() * 0.5001
    assert (
        ((values * scale.unsqueeze(1)).double() - weight.double())
        .abs()
        .amax(1)
        .le(half_a_step + 1e-12)
        .all()
    )


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_is_the_same_alone_and_with_any_threads(int8: bool) -> None:
    x, weight = normal(33, 300, seed=1, dtype=torch.bfloat16), normal(130, 300, seed=2)
    weight = weight.to(torch.bfloat16)
    packed = pack_int8(weight, x.dtype) if int8 else pack_weight(weight)
    whole = packed_linear(x, packed)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 4, 7, 20):
                assert torch.equal(packed_linear(x[5 : 5 + rows], packed), whole[5 : 5 + rows])
    finally:
        torch.set_num_threads(before)


def test_without_a_kernel_the_weight_stays_as_it_is() -> None:
    x, weight = normal(3, 20, seed=1, dtype=torch.float32), normal(9, 20, seed=2).float()
    with dispatch.only("torch"):
        packed = pack_weight(weight)
        assert packed.data.data_ptr() == weight.data_ptr()
        assert_within(packed_linear(x, packed), x.double() @ weight.double().mT, 20)
        assert torch.equal(packed_linear(x, packed), packed_linear_reference(x, packed))


def test_bytes_that_a_token_reads() -> None:
    weight = normal(64, 48, seed=1).bfloat16()
    assert pack_weight(weight).nbytes == 64 * 48 * 2
    assert pack_int8(weight, torch.bfloat16).nbytes == 64 * 48 + 64 * 4


def test_another_format_is_refused() -> None:
    packed = native.pack(normal(9, 20, seed=2).float())
    with pytest.raises(KernelError, match=r"x is torch.bfloat16, the packed weight torch.float32"):
        native.packed_linear(torch.ones(2, 20).bfloat16(), packed, 9, None, None)
    with pytest.raises(KernelError, match="cannot be packed"):
        native.pack(torch.ones(2, 3, dtype=torch.float64))
