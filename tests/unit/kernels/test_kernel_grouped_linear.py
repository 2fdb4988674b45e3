"""The grouped product, by torch's kernel and by a loop, against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fivefold.kernels import dispatch
from fivefold.kernels import grouped_linear as kernels
from fivefold.kernels.grouped_linear import grouped_linear, is_grouped

held = settings(deadline=None, derandomize=True, max_examples=40)
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def operands(
    counts: list[int], inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(counts) + inputs)
    x = torch.randn(sum(counts), inputs, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), outputs, inputs, generator=generator)
    return x, weight.to(dtype).requires_grad_(), torch.tensor(counts)


def exact(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Row by row."""
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    return torch.einsum("mi,moi->mo", x, weight[owner])


@held
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([3, 8, 16]),
    st.sampled_from([5, 8, 24]),
    st.sampled_from(list(ROUNDING)),
    st.booleans(),
)
def test_values_and_gradients(
    counts: list[int], inputs: int, outputs: int, dtype: torch.dtype, native: bool
) -> None:
    for loop in (False, True):
        x, weight, each = operands(counts, inputs, outputs, dtype)
        with pytest.MonkeyPatch.context() as patch:
            if native:
                patch.setattr(dispatch, "NATIVE_ON_CPU", frozenset(ROUNDING))
            if loop:
                patch.setattr(kernels, "is_grouped", lambda *_: False)
            found = grouped_linear(x, weight, each)
            slope = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
            (found * slope.to(dtype)).sum().backward()
        wide_x, wide = (t.detach().double().requires_grad_() for t in (x, weight))
        expected = exact(wide_x, wide, each)
        (expected * slope.to(dtype).double()).sum().backward()
        assert found.dtype == dtype
        for value, reference in (
            (found, expected), (x.grad, wide_x.grad), (weight.grad, wide.grad)
        ):  # fmt: skip
            assert value is not None and reference is not None
            assert value.shape == reference.shape
            scale = max(1.0, reference.abs().max().item()) if reference.numel() else 1.0
            difference = (value.double() - reference).abs()
            assert not value.numel() or difference.max().item() <= ROUNDING[dtype] * scale


def test_gradients_and_rows_may_lie_in_memory_as_they_like() -> None:
    x, weight, counts = operands([2, 0, 3], 8, 12, torch.float32)
    grouped_linear(x, weight, counts).sum().backward()
    found = [x.grad, weight.grad]
    x.grad = weight.grad = None
    spaced = torch.cat((x, x), dim=1)[:, :8]
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    out = grouped_linear(spaced, turned, counts)
    out.backward(torch.ones(12, 5).mT)
    for value, expected in zip((x.grad, weight.grad), found, strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_shapes_flow_through_fakes_and_the_meta_device(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        for device in ("cpu", "meta"):
            x = torch.empty(5, 8, dtype=dtype, device=device, requires_grad=True)
            weight = torch.empty(3, 12, 8, dtype=dtype, device=device, requires_grad=True)
            out = grouped_linear(x, weight, torch.empty(3, dtype=torch.int64, device=device))
            out.sum().backward()
            assert (out.shape, out.dtype) == ((5, 12), dtype)
            assert x.grad is not None and x.grad.shape == x.shape
            assert weight.grad is not None and weight.grad.shape == weight.shape


def test_it_is_compiled_as_one_graph() -> None:
    torch._dynamo.reset()
    x, weight, counts = operands([2, 0, 3], 8, 12, torch.float32)
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    compiled(x, weight, counts).square().sum().backward()
    found = [x.grad, weight.grad]
    x.grad = weight.grad = None
    grouped_linear(x, weight, counts).square().sum().backward()
    for value, expected in zip((x.grad, weight.grad), found, strict=True):
        torch.testing.assert_close(value, expected)


def test_torchs_kernel_is_used_where_it_can() -> None:
    x, weight, _ = operands([2, 0, 3], 8, 12, torch.float32)
    assert is_grouped(x, weight)
    assert not is_grouped(x[:0], weight)
    assert not is_grouped(x.double(), weight.double())
    assert not is_grouped(*operands([2, 3], 7, 12, torch.float32)[:2])
