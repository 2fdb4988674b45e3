"""Every Triton kernel compiles for Hopper and fits it. Nothing here ran on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import Call, compile_calls

from fivefold.kernels.triton import is_available

MOST_SHARED = 227 << 10  # bytes a block may have on Hopper


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def row_calls() -> list[Call]:
    x, weight, inverse = tensor(6, 576), tensor(576), tensor(6, dtype=torch.float32)
    heads, angles = tensor(1, 4, 9, 64), tensor(1, 4, 32, dtype=torch.float32)
    gate, up = tensor(6, 3072).chunk(2, dim=-1)
    logits, labels = tensor(6, 49152, dtype=torch.float32), tensor(6, dtype=torch.int64)
    flat = [tensor(5000, dtype=torch.float32) for _ in range(4)]
    return [
        ("rms_norm", "rms_norm", (x, weight, 1e-5, 0.0)),
        ("rms_norm", "rms_norm_residual", (x, x, weight, 1e-5, 0.0)),
        ("rms_norm", "rms_norm_backward", (x, x, weight, inverse, 0.0)),
        ("rope", "rotate", (heads, angles, angles)),
        ("gated", "gated", (gate, up, "silu")),
        ("gated", "gated_backward", (gate, gate, up, "gelu_tanh")),
        ("adamw", "adamw_", (*flat, tensor(5000), 1e-3, 0.9, 0.95, 1e-8, 0.1, 1)),
        ("adamw", "adamw_", (*flat, None, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1)),
        ("cross_entropy", "cross_entropy_slope_", (logits, labels, 30.0, 1e-4, 0.1)),
        ("cross_entropy", "log_probs", (logits, labels, 0.0)),
        ("head_part", "part_sums_", (logits, labels, 30.0)),
        ("head_part", "part_slopes_", (logits, labels, 30.0, inverse, inverse, inverse)),
    ]


def product_calls(dtype: torch.dtype) -> list[Call]:
    x, weight = tensor(6, 576, dtype=dtype), tensor(1536, 576, dtype=dtype)
    experts, counts = tensor(4, 1536, 576, dtype=dtype), torch.tensor([1, 0, 5, 0])
    scale, grad = tensor(1536, dtype=torch.float32), tensor(6, 1536, dtype=dtype)
    return [
        ("matmul", "matmul", (x, weight.mT, weight[:, 0])),
        ("matmul", "matmul", (x, tensor(576, 1536, dtype=dtype))),
        ("int8_linear", "int8_linear", (x, weight.to(torch.int8), scale)),
        ("grouped_linear", "grouped_multiply", (x, experts, counts)),
        ("grouped_linear", "grouped_multiply", (grad, experts.mT, counts)),
        ("grouped_linear", "grouped_outer", (grad, x, counts)),
    ]


def attention_calls(dtype: torch.dtype, head_dim: int, value_dim: int) -> list[Call]:
    query, key = tensor(6, 9, head_dim, dtype=dtype), tensor(6, 3, head_dim, dtype=dtype)
    value, out = tensor(6, 3, value_dim, dtype=dtype), tensor(6, 9, value_dim, dtype=dtype)
    lse = tensor(9, 6, dtype=torch.float32)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    caches = (tensor(8, 16, 3, head_dim, dtype=dtype), tensor(8, 16, 3, value_dim, dtype=dtype))
    table, lengths = tensor(2, 70, dtype=torch.int32), tensor(2, dtype=torch.int32)
    rule: tuple[Any, ...] = (True, 1, 0.1, 30.0)
    return [
        ("flash_attention", "flash_attention", (query, key, value, starts, starts, *rule)),
        ("flash_attention_backward", "flash_attention_backward",
         (out, query, key, value, out, lse, starts, starts, *rule)),
        ("paged_attention", "paged_attention",
         (query, *caches, table, starts, lengths, *rule[1:])),
    ]  # fmt: skip


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.skipif(not is_available(), reason="triton is not installed")
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    calls = [*row_calls(), *product_calls(BF16), *attention_calls(BF16, 64, 64)]
    on_tensor_cores = {
        "matmul_kernel", "int8_linear_kernel", "grouped_multiply_kernel", "grouped_outer_kernel",
        "forward_kernel", "queries_kernel", "keys_kernel", "paged_kernel",
    }  # fmt: skip
    kernels = [each for call in compile_calls(calls, str(tmp_path)) for each in call]
    for kernel in kernels:
        assert kernel.shared <= MOST_SHARED, kernel
        assert kernel.tensor_cores == (kernel.name in on_tensor_cores), kernel
    assert on_tensor_cores <= {kernel.name for kernel in kernels}


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="triton is not installed")
@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        (BF16, (80, 80)),
        (BF16, (192, 128)),
        (BF16, (256, 256)),
        (FP32, (64, 64)),
        (FP32, (128, 128)),
    ],
)
def test_attention_of_wide_heads_fits_hopper(
    tmp_path: Path, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    for call in compile_calls(attention_calls(dtype, *widths), str(tmp_path)):
        for kernel in call:
            assert kernel.shared <= MOST_SHARED, kernel


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="triton is not installed")
def test_products_of_fp32_fit_hopper(tmp_path: Path) -> None:
    for call in compile_calls(product_calls(FP32), str(tmp_path)):
        for kernel in call:
            assert kernel.shared <= MOST_SHARED, kernel
