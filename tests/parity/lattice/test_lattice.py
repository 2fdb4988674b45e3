"""Every layout trains as one process does: losses, norms, every gradient, masters and moments.

In fp64 the limit is 1e-10: rounding stays below 1e-11 here, and no wrong factor can hide. In fp32 losses
agree to 1e-5 and gradients to 1e-4, relative to their norm.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.layout import Layout
from tests.dist.harness import Workers
from tests.parity.lattice import cases
from tests.parity.lattice.faults import FAULTS
from tests.parity.lattice.layouts import layouts

EXACT = {"rows": 1e-10, "gradients": 1e-10, "state": 1e-10}
SINGLE = {"rows": 1e-5, "gradients": 1e-4}
GetWorkers = Callable[[int], Workers]
MODELS = list(cases.MODELS)
# Chosen so that each axis meets each other one, on each model; the rest is drawn and in `slow`,
# with some of these, for the time they take.
CHOSEN = [
    ("dense", "tp=2,pp=2,cp=2"),
    pytest.param("dense", "dp_shard=2,tp=2,cp=2,zero=3", marks=pytest.mark.slow),
    ("dense", "pp=4,schedule=dualpipe"),
    pytest.param("dense", "pp=2,schedule=dualpipe,dp_replicate=2,tp=2", marks=pytest.mark.slow),
    ("tied", "pp=2,tp=2,dp_replicate=2,schedule=zb-h1"),
    pytest.param("tied", "tp=4,sequence_parallel=false", marks=pytest.mark.slow),
    ("tied", "pp=2,dp_shard=2,zero=3,schedule=interleaved,virtual=2"),
    ("moe", "dp_shard=2,tp=2,ep=4,zero=3"),
    pytest.param("moe", "cp=4,ep=2,ulysses=2,zero=1", marks=pytest.mark.slow),
    ("moe", "pp=2,dp_replicate=2,dp_shard=2,ep=2,zero=1,schedule=zbv"),
    ("mla", "cp=2,tp=2,ep=4,zero=2"),
    pytest.param("mla", "dp_shard=2,cp=2,tp=2,ep=8,zero=2", marks=pytest.mark.slow),
    pytest.param("mla", "pp=2,tp=2,ep=2,schedule=dualpipe-v", marks=pytest.mark.slow),
    ("mla", "dp_shard=2,pp=4,ep=2"),  # zero 3, and a stage without experts
    ("mla", "dp_shard=4,ep=2,cp_kind=gather,order=cp/tp/dp_shard/dp_replicate/pp,zero=3"),
]


@cache
def _alone(model: str, layers: int, shape_of: str, dtype: str, steps: int) -> dict[str, Any]:
    return cases.train("", model, dtype, shape_of=shape_of, steps=steps)


def alone(model: str, layout: str, dtype: str, steps: int = cases.STEPS) -> dict[str, Any]:
    """The same steps in this process."""
    layers = cases.model_config(model, layout).num_layers
    return _alone(model, layers, "pp=8" if layers == 8 else "pp=4", dtype, steps)


def check(
    workers: GetWorkers,
    layout: str,
    model: str,
    dtype: str = "fp64",
    options: dict[str, Any] | None = None,
) -> None:
    found = workers(Layout.parse(layout).world_size).run(
        cases.train, layout, model, dtype, None, options
    )
    limits = EXACT if dtype == "fp64" else SINGLE
    for answer in found[:1]:  # whole tensors are gathered from all ranks
        errors = cases.errors(answer, alone(model, layout, dtype))
        assert all(errors[what] <= limit for what, limit in limits.items()), errors


@pytest.mark.parametrize(("model", "layout"), CHOSEN)
def test_layouts_train_as_one_process(workers: GetWorkers, model: str, layout: str) -> None:
    check(workers, layout, model)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "tp=2,cp=2"),
        pytest.param("tied", "pp=2,dp_shard=2,zero=1", marks=pytest.mark.slow),
        pytest.param("mla", "dp_shard=2,tp=2,ep=4", marks=pytest.mark.slow),
    ],
)
def test_in_single_precision(workers: GetWorkers, model: str, layout: str) -> None:
    check(workers, layout, model, "fp32")


@settings(deadline=None, derandomize=True, max_examples=2)
@given(model=st.sampled_from(MODELS), ranks=st.sampled_from([2, 4]), seed=st.integers(0, 10_000))
def test_drawn_layouts(workers: GetWorkers, model: str, ranks: int, seed: int) -> None:
    fitting = layouts(ranks, cases.model_config(model, "pp=8"), seed)
    check(workers, random.Random(seed).choice(fitting), model)


@pytest.mark.parametrize(
    ("model", "layout", "recompute"),
    [
        pytest.param("dense", "tp=2,cp=2", "full", marks=pytest.mark.slow),
        ("moe", "pp=2,dp_shard=2,ep=2,zero=1,schedule=zb-h1,stage_layers=1/3", "full"),
        pytest.param("mla", "dp_shard=2,tp=2,ep=2,zero=3", "selective", marks=pytest.mark.slow),
        ("moe", "dp_shard=4,ep=4,zero=3", "selective"),
        pytest.param(
            "tied", "pp=2,cp=2,zero=3,cp_kind=gather", "selective", marks=pytest.mark.slow
        ),
    ],
)
def test_with_recomputation(workers: GetWorkers, model: str, layout: str, recompute: str) -> None:
    """Collectives run again in backward, on every rank in the same order."""
    check(workers, layout, model, options={"recompute": recompute})


@pytest.mark.slow
@pytest.mark.timeout(1200)  # ten layouts of 8 ranks on two cores
@pytest.mark.parametrize("share", range(8))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_layout(workers: GetWorkers, model: str, ranks: int, share: int) -> None:
    wrong = {}
    for layout in layouts(ranks, cases.model_config(model, "pp=8"))[share::8]:
        try:
            check(workers, layout, model)
        except AssertionError as error:
            wrong[layout] = str(error)[-1000:]
    assert not wrong


@pytest.mark.parametrize("fault", list(FAULTS))
def test_planted_faults_show(workers: GetWorkers, fault: str) -> None:
    """Each is caught by the check above, by more than a hundred times its limit."""
    planted = FAULTS[fault]
    ranks = Layout.parse(planted.layout).world_size
    answer = workers(ranks).run(
        cases.train, planted.layout, planted.model, "fp64", fault, None, "", 1
    )[0]
    wanted = alone(planted.model, planted.layout, "fp64", 1)
    assert max(cases.errors(answer, wanted).values()) > 1e-8
