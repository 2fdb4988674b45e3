"""`split_linear` against fp64, for any number of threads, and when it is chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import assert_within, double
from kernel_cases import normal as normal_in

from fivefold.kernels import split_linear as split_module
from fivefold.kernels.linear import linear, linear_reference
from fivefold.kernels.split_linear import is_split, split_linear


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal_in(*shape, seed=seed, dtype=dtype)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(split_module, "LEAST_ELEMENTS", 96 * 40)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1,), (8,), (2, 3), (1, 1)])
def test_equals_fp64(threads: int, shape: tuple[int, ...], biased: bool) -> None:
    x, weight, bias = normal(*shape, 40, seed=1), normal(96, 40, seed=2), normal(96, seed=3)
    given = (x, weight, bias) if biased else (x, weight)
    copies = [t.clone() for t in given]
    assert_within(split_linear(*given), linear_reference(*double(*given)), 20)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    with torch.no_grad():
        assert_within(linear(*given), linear_reference(*double(*given)), 20)


def test_chosen_for_few_rows_whose_outputs_divide(threads: int) -> None:
    weight = normal(96, 40)
    assert is_split(normal(1, 40), weight) == (threads > 1)
    assert is_split(normal(2, 4, 40), weight) == (threads > 1)
    assert not is_split(normal(9, 40), weight)
    assert not is_split(normal(0, 40), weight)
    assert not is_split(normal(1, 40), normal(97, 40))
    assert not is_split(normal(1, 40), normal(48, 40))
    assert not is_split(normal(1, 40), normal(40, 96).T)
    assert not is_split(normal(1, 40, dtype=torch.bfloat16), weight.bfloat16())
