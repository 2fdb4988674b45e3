from __future__ import annotations

import re

import pytest

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.catalogue import DEVICES
from fivefold.plan.search.answer import Asked, answer
from fivefold.plan.search.change import change_of, enough_nodes
from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.guess import judge_guess, parse_guess
from fivefold.plan.search.search import search
from tests.unit.plan.search.jobs import job


def test_what_fits_nowhere_says_by_how_much_and_what_would() -> None:
    asked = job("llama-3.1-70b", "8xH100", 4096, 64)
    with pytest.raises(PlanError) as refused:
        answer(asked, estimators(), Asked(others=tuple(DEVICES.values())))
    text = str(refused.value)
    assert re.search(r"does not fit by [\d.]+ GiB per GPU, even with ", text), text
    assert "smallest change that fits: offload=" in text
    assert re.search(r"or \d+ nodes instead of 1", text), text
    assert re.search(r"or 8 [\w-]+ with \d+ GiB each", text), text


def test_so_many_nodes_are_enough_and_one_less_is_not() -> None:
    asked = job("llama-3.1-70b", "8xH100", 4096, 64)
    nodes = enough_nodes(asked, estimators())
    assert nodes is not None and nodes > 1
    assert search(asked.on(nodes), estimators(), wanted=1, with_front=False).best
    assert not search(asked.on(nodes - 1), estimators(), wanted=1, with_front=False).best


def test_a_batch_that_nothing_divides() -> None:
    with pytest.raises(PlanError) as refused:
        answer(job("smollm2-135m", "31x1xH100", 2048, 5), estimators(), Asked())
    assert "no layout of" in str(refused.value)
    assert "use a batch of 31" in str(refused.value)


def test_the_smallest_change_of_a_guess_changes_one_thing_and_fits() -> None:
    asked = job("llama-2-13b", "4x8xA100-80GB", 2048, 512)
    guess = judge_guess(
        asked, parse_guess("dp=32,zero=3,micro_batch=16,recompute=none"), estimators()
    )
    assert not guess.fits
    change = change_of(guess, estimators())
    assert change is not None and change.found.fits
    assert change.words in (
        "recompute=selective",
        "recompute=full",
        "micro_batch=4",
        "micro_batch=8",
    )
