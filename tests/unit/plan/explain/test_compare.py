from __future__ import annotations

import json

import pytest

from fivefold.plan.explain.compare import differences, pieces_in_words, verdict
from fivefold.plan.explain.record import record
from fivefold.plan.search.answer import Answer, Asked, answer, check_objective
from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.found import Found, judge
from fivefold.plan.search.guess import parse_guess
from fivefold.plan.workload import Strategy
from tests.unit.plan.search.jobs import job


@pytest.fixture(scope="module")
def found() -> Answer:
    asked = job("llama-3.1-8b", "2x8xH100", 4096, 128, tokens=1e11)
    return answer(asked, estimators(), Asked(guess=parse_guess("tp=8,pp=2,schedule=1f1b")))


def of(
    text: str, micro_batch: int = 1, recompute: str = "none", model: str = "llama-3.1-8b"
) -> Found:
    asked = job(model, "2x8xH100", 4096, 128)
    strategy = Strategy(parse_guess(text).layout, micro_batch, recompute)  # type: ignore[arg-type]
    return judge(asked, strategy, estimators())


@pytest.mark.parametrize(
    ("first", "second", "piece", "says"),
    [
        (("dp=16,zero=1",), ("dp=16,zero=1", 1, "full"), "recompute", "recompute=full runs"),
        (("tp=8,dp=2,zero=1",), ("tp=16",), "tp exposed", "TP 16 crosses the NVLink 4 domain of 8"),
        (("tp=2,dp=8,zero=1",), ("tp=8,dp=2,zero=1",), "tp exposed", "tp=8 talks inside every layer"),
        (
            ("pp=4,dp=4,zero=1,schedule=interleaved,virtual=4",), ("pp=4,dp=4,zero=1", 8),
            "bubble", "4 micro-batches on 4 stages with 1f1b",
        ),
        (("dp=16,zero=1", 8), ("dp=16,zero=3", 1), "dp exposed", "zero=3 gathers parameters for each"),
    ],
)  # fmt: skip
def test_a_difference_is_named_and_explained(
    first: tuple[str], second: tuple[str], piece: str, says: str
) -> None:
    ours, theirs = of(*first), of(*second)  # type: ignore[arg-type]
    named = {each.piece: each for each in differences(ours, theirs)}
    assert named[piece].seconds > 0 and says in named[piece].why
    total = sum(each.seconds for each in named.values())
    assert total == pytest.approx(theirs.seconds - ours.seconds, abs=0.05 * ours.seconds)
    backward = {each.piece: each for each in differences(theirs, ours)}
    assert backward[piece].seconds == -named[piece].seconds
    assert says in backward[piece].why


def test_a_verdict_says_how_much_and_why() -> None:
    text = verdict(of("tp=8,dp=2,zero=1"), of("tp=16"))
    assert "% slower; TP 16 crosses the NVLink 4 domain of 8: +" in text
    assert text.endswith("exposed tp communication")
    same = of("dp=16,zero=1")
    assert verdict(same, same) == "0.0% slower"


def test_pieces_add_up(found: Answer) -> None:
    for each in (*found.ranking, *found.front):
        assert sum(seconds for _, seconds in each.time.pieces) == pytest.approx(each.seconds)
    assert pieces_in_words(found.winner).startswith("products ")


def test_the_record_is_json_and_complete(found: Answer) -> None:
    shown = json.loads(json.dumps(record(found), allow_nan=False))
    assert shown["best"]["layout"] == shown["ranking"][0]["layout"]
    assert shown["best"]["run"]["days"] > 0
    assert shown["guess"]["layout"]["tp"] == 8 and shown["guess"]["fits"]
    assert shown["guess_differs"][0]["why"]
    assert {each["devices"] for each in shown["front"]} == {8, 16}
    assert shown["search"]["judged"] > 0


def test_the_objective_leads_the_ranking() -> None:
    asked = job("llama-3.1-8b", "2x8xH100", 4096, 128)
    by = {
        name: answer(asked, estimators(), Asked(objective=check_objective(name))).winner
        for name in ("time", "cost", "memory")
    }
    assert by["time"].seconds <= min(by["cost"].seconds, by["memory"].seconds)
    assert by["cost"].device_seconds < by["time"].device_seconds
    assert by["cost"].job.devices == 8
    assert by["memory"].bytes < by["time"].bytes
