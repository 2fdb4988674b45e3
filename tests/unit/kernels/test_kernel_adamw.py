"""AdamW over flat tensors against torch's own and the formula in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import held, normal
from native_cases import threads, unaligned
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.adamw import adamw_, adamw_reference_
from fivefold.kernels.cpu.library import KernelError

SETTINGS: dict[str, Any] = {
    "lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
}  # fmt: skip
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def state(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameter, first and second moment, before the first step."""
    return [normal(count, seed=1).to(dtype), *torch.zeros(2, count, dtype=dtype)]


def slope(count: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a size from the least that counts to the largest."""
    sizes = 10.0 ** torch.linspace(-12, 3, count, dtype=torch.float64)
    return (normal(count, seed=50 + step) * sizes).to(dtype)


def exact(count: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """The state after so many steps, in fp64."""
    parameter, first, second = state(count, torch.float64)
    parameter = parameter.float().double()
    for step in range(1, steps + 1):
        gradient = slope(count, step, dtype).double()
        adamw_reference_(parameter, gradient, first, second, None, **SETTINGS, step=step)
    return [parameter, first, second]


def assert_close(found: list[Tensor], expected: list[Tensor], largest: Tensor) -> None:
    """Within fp32's rounding; a mean of gradients up to `largest` [P] may cancel."""
    terms = [SETTINGS["lr"], 0.2 * largest, 0.0]
    for actual, right, term in zip(found, expected, terms, strict=True):
        allowed = 1e-6 * (right.abs() + term) + 1e-37
        assert ((actual.double() - right).abs() <= allowed).all()


@held
@given(st.integers(1, 70), st.integers(1, 4), st.sampled_from(FORMATS), st.booleans())
def test_equals_the_formula_and_torch(
    count: int, steps: int, dtype: torch.dtype, odd: bool
) -> None:
    assert dispatch.is_native("adamw", "cpu", torch.float32)
    place = unaligned if odd else Tensor.clone
    found = [place(x) for x in state(count)]
    copy = torch.full((count,), float("nan"), dtype=torch.bfloat16)
    theirs = torch.nn.Parameter(state(count)[0])
    optimizer = torch.optim.AdamW(
        [theirs], lr=SETTINGS["lr"], betas=(SETTINGS["beta1"], SETTINGS["beta2"]),
        eps=SETTINGS["eps"], weight_decay=SETTINGS["weight_decay"],
    )  # fmt: skip
    for step in range(1, steps + 1):
        gradient = place(slope(count, step, dtype))
        before = gradient.clone()
        adamw_(found[0], gradient, *found[1:], **SETTINGS, step=step, copy=copy)
        assert torch.equal(gradient, before)
        theirs.grad = gradient.float()
        optimizer.step()
    slopes = [slope(count, step, dtype).double().abs() for step in range(1, steps + 1)]
    assert_close(found, exact(count, steps, dtype), torch.stack(slopes).amax(0))
    torch.testing.assert_close(found[0], theirs.detach(), rtol=3e-6, atol=1e-7)
    assert torch.equal(copy, found[0].bfloat16())


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_copy_in_every_format(dtype: torch.dtype) -> None:
    found, copy = state(37), torch.empty(37, dtype=dtype)
    adamw_(found[0], slope(37, 1), *found[1:], **SETTINGS, step=1, copy=copy)
    assert torch.equal(copy, found[0].to(dtype))


def test_nothing_but_its_own_numbers_is_written() -> None:
    tensors = [torch.full((60,), 7.0) for _ in range(4)]
    inner = [x[8:51] for x in tensors]
    adamw_(*inner[:4], **SETTINGS, step=1)  # type: ignore[call-arg]
    for x in tensors:
        assert (x[:8] == 7).all()
        assert (x[51:] == 7).all()


def test_same_bits_on_one_and_two_threads_and_wherever_a_number_lies() -> None:
    count = 40_013
    results = []
    for team in (1, 2):
        found = state(count)
        with threads(team):
            adamw_(found[0], slope(count, 1), *found[1:], **SETTINGS, step=1)
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for start in (1, 40_000, 40_012):  # a number in the last, narrow vector, and elsewhere
        found = [x[start:].clone() for x in state(count)]
        adamw_(found[0], slope(count, 1)[start:].clone(), *found[1:], **SETTINGS, step=1)
        assert all(torch.equal(a, b[start:]) for a, b in zip(found, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_knows_the_operator(dtype: torch.dtype) -> None:
    parameter, first, second = state(9, dtype)
    copy = torch.zeros(9, dtype=torch.bfloat16)
    torch.library.opcheck(
        torch.ops.fivefold.adamw_,
        (parameter, slope(9, 1), first, second, copy, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3),
    )


def test_compiled_it_is_the_same() -> None:
    plain, compiled = state(19), state(19)
    adamw_(plain[0], slope(19, 1), *plain[1:], **SETTINGS, step=1)
    step = torch.compile(adamw_, fullgraph=True, backend="aot_eager")
    step(compiled[0], slope(19, 1), *compiled[1:], **SETTINGS, step=1)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


def test_a_parameter_that_requires_a_gradient() -> None:
    parameter, first, second = state(9)
    leaf = parameter.clone().requires_grad_()
    adamw_(leaf, slope(9, 1), first, second, **SETTINGS, step=1)
    assert not torch.equal(leaf, parameter)
    assert leaf.grad_fn is None


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"gradient": torch.ones(5)}, r"gradient is \[5\] .* the parameter \[4\]"),
    "strides": ({"first": torch.ones(8)[::2]}, r"first moment is \[4\] with strides \[2\]"),
    "format": ({"second": torch.ones(4).bfloat16()}, "second moment is torch.bfloat16"),
    "step": ({"step": 0}, "from 1, not 0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_operands_are_named(name: str) -> None:
    changed, message = ERRORS[name]
    names = ("parameter", "gradient", "first", "second")
    given = {n: torch.ones(4) for n in names} | SETTINGS | {"step": 1} | changed
    with pytest.raises(KernelError, match=message) as caught:
        adamw_(**given)
    assert "\n" not in str(caught.value)
