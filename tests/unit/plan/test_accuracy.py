"""Predictions beside published measurements: fails when a change makes them worse.

Limits are what is reached, with a little room; what was asked for is beside them. Rows of vTrain are
embedded in part; the whole tables are used where they are at hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.plan.time.bubbles import BUBBLES, SCHEDULES, bubble
from fivefold.plan.time.published import (
    deepseek,
    korthikanti,
    llama3,
    mean_error,
    nemo,
    sc21,
    vtrain,
    worst_error,
)


def test_sc21() -> None:  # asked: 6 % mean, 12 % worst
    cases = sc21()
    assert len(cases) == 10
    assert mean_error(cases) < 0.04
    assert worst_error(cases) < 0.075


def test_korthikanti() -> None:  # asked: 6 %
    cases = korthikanti()
    assert len(cases) == 4
    assert mean_error(cases) < 0.03
    assert worst_error(cases) < 0.06


def test_vtrain_embedded() -> None:
    assert mean_error(vtrain(single=True)) < 0.09
    assert mean_error(vtrain(single=False)) < 0.08


def test_vtrain_single_node(shared_data: Path) -> None:  # asked: 12 %
    cases = vtrain(True, shared_data / "published" / "vtrain_a100_single.csv")
    assert len(cases) > 700
    assert mean_error(cases) < 0.09


def test_vtrain_multi_node(shared_data: Path) -> None:  # asked: 12 %
    cases = vtrain(False, shared_data / "published" / "vtrain_a100_multi.csv")
    assert len(cases) == 54
    assert mean_error(cases) < 0.065


def test_llama_3() -> None:
    cases = llama3()
    assert mean_error(cases) < 0.065
    assert abs(cases[0].error) < 0.08  # 430 TFLOP/s


def test_tables_that_constants_were_not_made_from() -> None:
    assert mean_error(nemo()) < 0.10
    assert worst_error(deepseek()) < 0.25


@pytest.mark.parametrize("model", BUBBLES, ids=lambda model: model.name)
def test_bubbles(model: object) -> None:  # asked: right ordering, within 0.03
    found = {name: bubble(model, name) for name in SCHEDULES}  # type: ignore[arg-type]
    measured = dict(zip(SCHEDULES, model.measured, strict=True))  # type: ignore[attr-defined]
    for name in SCHEDULES:
        assert found[name] == pytest.approx(measured[name], abs=0.027)
    for better in SCHEDULES:
        for worse in SCHEDULES:
            if measured[worse] - measured[better] > 0.005:  # closer ones have no order
                assert found[worse] > found[better], (worse, better)
