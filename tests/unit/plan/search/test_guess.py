from __future__ import annotations

import pytest

from fivefold.core.errors import LayoutError
from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.guess import judge_guess, parse_guess
from tests.unit.plan.search.jobs import job


def test_what_is_not_said_is_looked_for() -> None:
    asked = job("llama-3.1-8b", "2x8xH100", 4096, 128)
    found = judge_guess(asked, parse_guess("tp=4"), estimators())
    assert found.fits
    assert found.strategy.layout.world_size == 16
    said = judge_guess(
        asked, parse_guess("tp=4,dp=4,zero=3,micro_batch=1,recompute=full"), estimators()
    )
    assert (said.strategy.micro_batch, said.strategy.recompute) == (1, "full")
    assert said.strategy.layout.zero == 3
    assert found.seconds < said.seconds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=four", "not a positive whole number"),
        ("tq=4", "unknown layout axis 'tq'; known: cp"),
        ("tp=4,micro_batch=0", "micro_batch='0'"),
        ("tp=4,recompute=ful", "recompute='ful' is not known; did you mean 'full'?"),
        ("tp", "is not AXIS=N"),
        ("tp=4,order=a/b", "order must name each of"),
    ],
)
def test_bad_words_name_themselves(text: str, says: str) -> None:
    with pytest.raises(LayoutError) as refused:
        parse_guess(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=4,dp=2", "has 8 ranks, the cluster 16 devices; use dp_shard=4"),
        ("tp=3", "has 3 ranks"),
        ("tp=16,recompute=full,micro_batch=3", "no multiple of micro-batches of 3"),
        ("dp_replicate=5,tp=3", "15 ranks"),
    ],
)
def test_a_guess_that_cannot_run_says_why(text: str, says: str) -> None:
    asked = job("llama-3.1-8b", "2x8xH100", 4096, 128)
    with pytest.raises(LayoutError) as refused:
        judge_guess(asked, parse_guess(text), estimators())
    assert says in str(refused.value)
