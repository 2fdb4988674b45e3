"""`linear` and `multiply` on each of their paths against fp64, and their independence of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import assert_rounded_once, assert_within, double, gradients, held, normal

from fivefold.kernels import dispatch
from fivefold.kernels.cpu.gemm import gemm
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.dispatch import NATIVE_ON_CPU, low_precision_gemm_is_native
from fivefold.kernels.linear import linear, linear_reference
from fivefold.kernels.multiply import MULTIPLY, multiply

LOW = [torch.bfloat16, torch.float16]
ALL = [torch.float32, *LOW]
shapes = st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=3), *[st.integers(1, 40)] * 2)


def operands(shape: tuple[list[int], int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rows, inputs, outputs = shape
    return (
        normal(*rows, inputs, seed=1, dtype=dtype),
        normal(outputs, inputs, seed=2, dtype=dtype),
        normal(outputs, seed=3, dtype=dtype),
    )


@pytest.fixture(params=["blas", "native", "through-fp32", "in-blocks"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path on every machine, whatever its instructions."""
    native = frozenset(LOW) if request.param == "blas" else frozenset()
    monkeypatch.setattr(dispatch, "NATIVE_ON_CPU", native)
    only = "native" if request.param == "native" else "torch"
    with dispatch.only(only), dispatch.deterministic(request.param == "in-blocks"):
        yield request.param


@held
@given(shapes)
def test_fp32_is_within_a_few_roundings_of_fp64(shape: tuple[list[int], int, int]) -> None:
    x, weight, bias = operands(shape, torch.float32)
    for policy in (False, True):
        with dispatch.deterministic(policy):
            # At most 40 products: each addition rounds once, by half a step of a partial sum.
            assert_within(linear(x, weight, bias), linear_reference(*double(x, weight, bias)), 20)
            assert_within(linear(x, weight), linear_reference(*double(x, weight)), 20)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", [([1], 37, 9), ([2, 3], 64, 5), ([7], 40, 40), ([0], 8, 4)])
def test_low_formats_are_within_a_step_of_fp64(
    path: str, dtype: torch.dtype, shape: tuple[list[int], int, int]
) -> None:
    x, weight, bias = operands(shape, dtype)
    upstream = normal(*shape[0], shape[2], seed=4, dtype=dtype)
    found = gradients(linear, (x, weight, bias), upstream)
    exact = gradients(linear_reference, double(x, weight, bias), upstream)
    for actual, expected in zip(found, exact, strict=True):
        # Half a step where rounded once at the end; torch's own may round the bias apart: one.
        assert_within(actual, expected, 1.0)
        assert actual.dtype == dtype


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("only", ["native", "torch"])
def test_rounds_once(
    dtype: torch.dtype, only: dispatch.Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "NATIVE_ON_CPU", frozenset())
    inputs = operands(([40], 48, 24), dtype)
    upstream = normal(40, 24, seed=4, dtype=dtype)
    with dispatch.only(only):
        found = gradients(linear, inputs, upstream)
    exact = gradients(linear_reference, double(*inputs), upstream)
    for actual, expected in zip(found, exact, strict=True):
        assert_rounded_once(actual, expected)


@pytest.mark.parametrize("dtype", LOW)
def test_few_rows_without_gradients_equal_many_rows(path: str, dtype: torch.dtype) -> None:
    x, weight, bias = operands(([64], 48, 24), dtype)
    with torch.no_grad():
        many = linear(x, weight, bias)
        few = torch.cat([linear(x[i : i + 2], weight, bias) for i in range(0, 64, 2)])
    assert_within(few, many.double(), 1.0)


@pytest.mark.parametrize("dtype", LOW)
def test_saved_for_backward_stays_in_the_low_format(path: str, dtype: torch.dtype) -> None:
    x, weight, bias = (t.requires_grad_() for t in operands(([9], 16, 8), dtype))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, weight, bias)
    assert saved
    assert {t.dtype for t in saved} == {dtype}


def test_gradient_of_a_frozen_weight_is_not_computed(path: str) -> None:
    x, weight, _ = operands(([9], 16, 8), torch.bfloat16)
    linear(x.requires_grad_(), weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_reference_has_the_right_gradient() -> None:
    inputs = tuple(t.requires_grad_() for t in operands(([2, 2], 3, 4), torch.float64))
    assert torch.autograd.gradcheck(linear_reference, inputs)
    x, weight, bias = (t.detach().requires_grad_() for t in operands(([5], 3, 4), torch.float64))
    assert torch.autograd.gradcheck(multiply, (x, weight.mT, bias))


def test_dispatch_asks_the_machine_for_low_formats_alone() -> None:
    assert low_precision_gemm_is_native("cpu", torch.float32)
    assert low_precision_gemm_is_native("cpu", torch.float64)
    assert low_precision_gemm_is_native("cuda", torch.bfloat16)
    for dtype in LOW:
        assert low_precision_gemm_is_native("cpu", dtype) == (dtype in NATIVE_ON_CPU)


@held
@given(
    m=st.integers(0, 30),
    n=st.integers(0, 70),
    k=st.sampled_from([0, 1, 2, 31, 255, 256, 257, 513, 1025, 2050]),
    dtype=st.sampled_from(ALL),
    turned=st.tuples(st.booleans(), st.booleans()),
    step=st.integers(1, 3),
)
def test_native_product_of_any_shape_and_strides(
    m: int, n: int, k: int, dtype: torch.dtype, turned: tuple[bool, bool], step: int
) -> None:
    a = normal(m, k * step, seed=1, dtype=dtype)[:, ::step]
    b = normal(n, k * step, seed=2, dtype=dtype)[:, ::step].mT
    if turned[0]:
        a = a.mT.contiguous().mT
    if turned[1]:
        b = b.contiguous()
    out = torch.full((m, n + 3), float("nan"))  # what is around the result stays as it was
    gemm(a, b, out=out[:, :n])
    exact = a.double() @ b.double()
    assert_within(out[:, :n], exact, 20, terms=k**0.5)
    assert out[:, n:].isnan().all()
    before = out[:, :n].clone()
    gemm(a, b, out=out[:, :n], accumulate=True)
    assert torch.equal(out[:, :n], before + before)


@held
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 50),
    k=st.sampled_from([1, 7, 300, 1100]),
    dtype=st.sampled_from(ALL),
    data=st.data(),
)
def test_a_row_depends_on_nothing_beside_it(
    m: int, n: int, k: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    x, weight, bias = operands(([m], k, n), dtype)
    start = data.draw(st.integers(0, m - 1))
    end = data.draw(st.integers(start + 1, m))
    for only in ("native", "torch"):
        with dispatch.deterministic(), dispatch.only(only):
            whole = linear(x, weight, bias)
            assert torch.equal(linear(x[start:end], weight, bias), whole[start:end])


def test_threads_change_nothing() -> None:
    x, weight, bias = operands(([50], 700, 90), torch.float32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gemm(x, weight.mT, bias=bias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_torchs_own_product_fails_that_test() -> None:
    """The control: one row alone and the same row among 64 differ in F.linear's bits."""
    x, weight, _ = operands(([64], 1536, 576), torch.float32)
    whole = torch.nn.functional.linear(x, weight)
    alone = torch.cat([torch.nn.functional.linear(row[None], weight) for row in x])
    assert not torch.equal(whole, alone)


def test_the_operator_is_one_for_compiler_fakes_and_autograd() -> None:
    x, weight, bias = (t.requires_grad_() for t in operands(([6], 20, 9), torch.bfloat16))
    torch.library.opcheck(MULTIPLY, (x, weight.mT, bias))
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    with dispatch.only("native"):
        found = compiled(x, weight, bias)
        found.float().square().sum().backward()
        assert torch.equal(found, linear(x, weight, bias))
    assert x.grad is not None


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.ones(2, 3), torch.ones(4, 2), r"cannot multiply \[2, 3\]"),
        (torch.ones(2, 3), torch.ones(3, 2).bfloat16(), "cannot multiply"),
        (torch.ones(2, 3).double(), torch.ones(3, 2).double(), "native kernels take"),
        (torch.ones(2, 3, device="meta"), torch.ones(3, 2, device="meta"), "on the CPU"),
    ],
)
def test_what_the_kernel_does_not_take_is_named(
    a: torch.Tensor, b: torch.Tensor, words: str
) -> None:
    with pytest.raises(KernelError, match=words):
        gemm(a, b)


def test_a_result_of_the_wrong_shape_is_refused() -> None:
    for out in (torch.empty(2, 3), torch.empty(2, 2).mT):
        with pytest.raises(KernelError, match="the result is"):
            gemm(torch.ones(2, 3), torch.ones(3, 2), out=out)
