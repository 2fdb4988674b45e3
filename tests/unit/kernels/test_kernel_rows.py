"""The row-wise kernels: what all of them owe, each test for norm, residual norm, gates and rope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_within, double, held, normal
from native_cases import LAYOUTS, poisoned, threads
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.kernels import dispatch
from fivefold.kernels.cpu import library
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.gated import gated, gated_reference
from fivefold.kernels.rms_norm import (
    rms_norm,
    rms_norm_reference,
    rms_norm_residual,
    rms_norm_residual_reference,
)
from fivefold.kernels.rope import apply_rope, apply_rope_reference

FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Kernel:
    """`inputs` of N rows and a size; the first `by_row` of them have their rows in dim 0."""

    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[int, int, torch.dtype], tuple[Tensor, ...]]
    by_row: int
    differentiable: int


def _turns(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    angles = 100 * normal(rows, 1, size, seed=2, dtype=torch.float32)
    return normal(rows, 1, 3, 2 * size, seed=1, dtype=dtype), angles.cos(), angles.sin()


def _rows(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return normal(rows, size, seed=1, dtype=dtype), 3 * normal(rows, size, seed=2, dtype=dtype)


def _weighted(count: int) -> Callable[[int, int, torch.dtype], tuple[Tensor, ...]]:
    return lambda rows, size, dtype: (
        *_rows(rows, size, dtype)[:count],
        normal(size, seed=4, dtype=dtype),
    )


KERNELS = {
    "norm": Kernel(
        lambda *a: rms_norm(*a, 1e-5, 1.0),
        lambda *a: rms_norm_reference(*a, 1e-5, 1.0),
        _weighted(1), by_row=1, differentiable=2,
    ),
    "residual": Kernel(
        lambda *a: rms_norm_residual(*a, 1e-5),
        lambda *a: rms_norm_residual_reference(*a, 1e-5),
        _weighted(2), by_row=2, differentiable=3,
    ),
    "silu": Kernel(
        lambda *a: gated(*a, "silu"), lambda *a: gated_reference(*a, "silu"),
        _rows, by_row=2, differentiable=2,
    ),
    "gelu": Kernel(
        lambda *a: gated(*a, "gelu_tanh"), lambda *a: gated_reference(*a, "gelu_tanh"),
        _rows, by_row=2, differentiable=2,
    ),
    "rope": Kernel(apply_rope, apply_rope_reference, _turns, by_row=3, differentiable=1),
}  # fmt: skip

kernels = pytest.mark.parametrize("name", KERNELS)


def run(kernel: Kernel, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Results, then gradients, by rows, under upstream gradients that depend on shapes alone."""
    inputs = tuple(x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in inputs[: kernel.differentiable]]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [_upstream(r.shape, 5 + i).to(r.dtype) for i, r in enumerate(results)]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, leaves, upstream)]


def _upstream(shape: torch.Size, seed: int) -> Tensor:
    """Row r's values are the same however many rows there are."""
    return torch.stack([normal(*shape[1:], seed=100 * seed + r) for r in range(shape[0])])


def by_row(kernel: Kernel) -> list[bool]:
    """Which of what `run` returns has rows in dim 0."""
    results = 2 if kernel is KERNELS["residual"] else 1
    return [True] * (results + kernel.by_row) + [False]


def test_the_native_kernels_are_what_is_tested() -> None:
    assert library.is_available(), library.FALLBACKS
    for op in ("rms_norm", "gated", "rope"):
        assert all(dispatch.is_native(op, "cpu", dtype) for dtype in FORMATS)
        assert not dispatch.is_native(op, "cpu", torch.float64)


@kernels
@held
@given(
    rows=st.sampled_from([1, 2, 3, 33]),
    size=st.integers(1, 70),
    dtype=st.sampled_from(FORMATS),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3),
)
def test_equals_fp64_however_operands_lie(
    name: str, rows: int, size: int, dtype: torch.dtype, layouts: tuple[str, ...]
) -> None:
    kernel = KERNELS[name]
    dense = kernel.inputs(rows, size, dtype)
    placed = tuple(LAYOUTS[lay](x) for lay, x in zip(layouts, dense, strict=False))
    with poisoned():
        found = run(kernel, kernel.function, placed)
    plain = run(kernel, kernel.function, dense)
    exact = run(kernel, kernel.reference, double(*dense))
    for actual, same, expected in zip(found, plain, exact, strict=True):
        assert torch.equal(actual, same)
        assert actual.dtype == dtype
        # Gradients of norms of few columns cancel, from terms as large as 1 / rms.
        terms = 12.0 if size > 8 else 300.0
        # Half a step, and the same again where the residual's sum is rounded before its norm.
        assert_within(actual, expected, 10 if dtype == torch.float32 else 1.1, terms=terms)


@kernels
@pytest.mark.parametrize("dtype", FORMATS[:2])
def test_no_worse_than_torch_in_the_low_format(name: str, dtype: torch.dtype) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(65, 250, dtype)
    found = run(kernel, kernel.function, inputs)
    torchs = run(kernel, kernel.reference, inputs)
    exact = run(kernel, kernel.reference, double(*inputs))
    for actual, other, expected in zip(found, torchs, exact, strict=True):
        mine, theirs = ((x.double() - expected).square().mean() for x in (actual, other))
        # In fp32 both are sums in some order; in bf16 the one rounding is all there is.
        assert mine <= (4 if dtype == torch.float32 else 1.05) * theirs + 1e-14


@kernels
@pytest.mark.parametrize("dtype", FORMATS[:2])
@pytest.mark.parametrize("size", [700, 37])
def test_same_bits_on_one_and_two_threads(name: str, dtype: torch.dtype, size: int) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(40_000 // size, size, dtype)
    with threads(1):
        one = run(kernel, kernel.function, inputs)
    with threads(2):
        two = run(kernel, kernel.function, inputs)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@kernels
@pytest.mark.parametrize("dtype", FORMATS[:2])
@pytest.mark.parametrize("size", [61, 64, 7])
def test_a_row_alone_equals_the_row_in_a_batch(name: str, dtype: torch.dtype, size: int) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(5, size, dtype)
    batch = run(kernel, kernel.function, inputs)
    for count in (1, 3):
        few = run(kernel, kernel.function, (
            *(x[:count] for x in inputs[: kernel.by_row]), *inputs[kernel.by_row :]
        ))  # fmt: skip
        for rows, all_rows, is_rows in zip(few, batch, by_row(kernel), strict=False):
            assert not is_rows or torch.equal(rows, all_rows[:count])


@kernels
def test_torch_knows_the_operator(name: str) -> None:
    kernel = KERNELS[name]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        inputs = [x.requires_grad_() for x in kernel.inputs(3, 10, dtype)[: kernel.differentiable]]
        rest = kernel.inputs(3, 10, dtype)[kernel.differentiable :]
        op, settings = {
            "norm": ("rms_norm", (1e-5, 1.0)),
            "residual": ("rms_norm_residual", (1e-5, 0.0)),
            "silu": ("gated", ("silu",)),
            "gelu": ("gated", ("gelu_tanh",)),
            "rope": ("rotate", (False,)),
        }[name]
        torch.library.opcheck(getattr(torch.ops.fivefold, op), (*inputs, *rest, *settings))


@kernels
def test_backward_operators_say_the_right_shapes(name: str) -> None:
    x, more, weight = _weighted(2)(3, 10, torch.bfloat16)
    inverse = torch.rand(3)
    op, arguments = {
        "norm": ("rms_norm_backward", (x, None, more, weight, inverse, 1.0)),
        "residual": ("rms_norm_backward", (x, more, more, weight, inverse, 0.0)),
        "silu": ("gated_backward", (x, more, x, "silu")),
        "gelu": ("gated_backward", (x, more, x, "gelu_tanh")),
        "rope": ("rotate", (*_turns(3, 10, torch.bfloat16), True)),
    }[name]
    torch.library.opcheck(getattr(torch.ops.fivefold, op), arguments)


@kernels
def test_derivative_in_fp64(name: str) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(2, 3, torch.float64)
    inputs = tuple(x.double() for x in inputs)
    leaves = tuple(x.requires_grad_() for x in inputs[: kernel.differentiable])
    rest = inputs[kernel.differentiable :]
    assert torch.autograd.gradcheck(lambda *a: kernel.function(*a, *rest), leaves)


@kernels
def test_compiled_and_checkpointed_it_is_the_same(name: str) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(4, 18, torch.bfloat16)
    plain = run(kernel, kernel.function, inputs)
    # Every operator is one node of the graph; aot_eager runs all of the compiler but its codegen.
    compiled = torch.compile(kernel.function, fullgraph=True, backend="aot_eager")
    again = lambda *a: checkpoint(kernel.function, *a, use_reentrant=False)  # noqa: E731
    for function in (compiled, again):
        found = run(kernel, function, inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@kernels
def test_nan_and_infinity_are_passed_on(name: str) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(3, 9, torch.float32)
    inputs[0][1, ..., 0] = float("nan")
    found = run(kernel, kernel.function, inputs)[0]
    assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().all()


@kernels
def test_no_rows_and_no_columns(name: str) -> None:
    kernel = KERNELS[name]
    for rows, size in ((0, 5), (3, 0)):
        found = kernel.function(*kernel.inputs(rows, size, torch.float32))
        for result in found if isinstance(found, tuple) else (found,):
            assert result.numel() == 0


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "weight": (lambda: rms_norm(torch.ones(2, 4), torch.ones(5), 1e-5), r"no weight \[5\]"),
    "residual": (
        lambda: rms_norm_residual(torch.ones(2, 4), torch.ones(3, 4), torch.ones(4), 1e-5),
        r"residual is \[3, 4\], not \[2, 4\]",
    ),
    "format": (
        lambda: gated(torch.ones(2), torch.ones(2, dtype=torch.bfloat16), "silu"),
        "up is torch.bfloat16 on cpu, not torch.float32 on cpu",
    ),
    "shape": (lambda: gated(torch.ones(2), torch.ones(3), "silu"), r"up is \[3\], not \[2\]"),
    "activation": (
        lambda: gated(torch.ones(2), torch.ones(2), "relu"),  # type: ignore[arg-type]
        "silu, gelu_tanh, not 'relu'",
    ),
    "odd head": (
        lambda: apply_rope(torch.ones(1, 2, 1, 3), *[torch.ones(1, 2, 1)] * 2), "an even E"
    ),
    "tables": (
        lambda: apply_rope(torch.ones(2, 2, 1, 4), *[torch.ones(1, 3, 2)] * 2),
        r"no tables \[1, 3, 2\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_operands_are_named(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(KernelError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
