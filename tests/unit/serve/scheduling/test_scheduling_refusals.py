"""What is refused, in one line each."""

from __future__ import annotations

import pytest

from fivefold.core.errors import PromptError
from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.errors import QueueFullError, SchedulingError
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.engines.serve.scheduling.prefix import PrefixIndex
from fivefold.engines.serve.scheduling.scheduler import Scheduler
from fivefold.engines.serve.scheduling.sequence import Sequence
from tests.unit.serve.scheduling.harness import Serving, added


def test_a_full_queue_says_when_to_come_back() -> None:
    now = 0.0
    blocks = BlockManager(10, 4)
    scheduler = Scheduler(
        blocks, PrefixIndex(blocks), max_sequences=1, queue_limit=2, clock=lambda: now
    )
    number = 0

    def arrive() -> None:
        nonlocal number
        number += 1
        scheduler.add(Sequence(number, [1, 2], 2, max_tokens=1))

    def refused() -> float:
        with pytest.raises(QueueFullError) as error:
            arrive()
        assert str(error.value).startswith("2 requests are waiting already; try again in ")
        return error.value.retry_after

    arrive(), arrive()
    assert refused() == 1.0
    for _ in range(8):  # one ends every 5 s
        now += 5.0
        plan = scheduler.schedule()
        scheduler.update(plan, {plan.chunks[0].sequence.id: [3]})
        arrive()
    now += 5.0
    assert [round(refused(), 1) for _ in range(3)] == [5.0, 10.0, 15.0]
    assert [refused() for _ in range(30)][-1] == 60.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_length": 0}, "sequence 1 has 4 tokens and a prompt_length of 0;"),
        ({"prompt_length": 5}, "sequence 1 has 4 tokens and a prompt_length of 5;"),
        ({"tokens": [], "prompt_length": 0}, "sequence 1 has 0 tokens and a prompt_length of 0;"),
        ({"max_tokens": 0}, "sequence 1 has 0 of max_tokens=0 already;"),
        ({"prompt_length": 2, "max_tokens": 2}, "sequence 1 has 2 of max_tokens=2 already;"),
        ({"state": "finished"}, "sequence 1 is finished with 0 tokens computed; add a new record"),
        ({"computed": 2}, "sequence 1 is waiting with 2 tokens computed; add a new record"),
        ({"priority": 101}, "priority=101 is out of range; priority must be between -100 and 100"),
        ({"priority": "high"}, "priority='high' is out of range;"),
        (
            {"max_tokens": 38},
            "a prompt of 4 tokens with 38 to produce needs 11 blocks of 4, but the cache has 10;",
        ),
    ],
)
def test_records_that_are_refused(fields: dict[str, object], message: str) -> None:
    serving = Serving(10, 4)
    values = {"id": 1, "tokens": [1, 2, 3, 4], "prompt_length": 4, "max_tokens": 3, **fields}
    with pytest.raises((SchedulingError, PromptError)) as error:
        serving.scheduler.add(Sequence(**values))  # type: ignore[arg-type]
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert not serving.scheduler.has_work
    serving.check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_sequences": 0}, "max_sequences=0; max_sequences must be at least 1"),
        ({"token_budget": 1.5}, "token_budget=1.5; token_budget must be at least 1"),
        ({"queue_limit": True}, "queue_limit=True; queue_limit must be at least 1"),
        ({"aging": -1}, "aging=-1; aging must be at least 1"),
        (
            {"max_sequences": 9, "token_budget": 8},
            "token_budget=8 is less than max_sequences=9; each running sequence needs one token"
            " a step",
        ),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, int], message: str) -> None:
    blocks = BlockManager(10, 4)
    with pytest.raises(SchedulingError) as error:
        Scheduler(blocks, PrefixIndex(blocks), **settings)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_an_index_of_other_blocks() -> None:
    with pytest.raises(SchedulingError, match=r"^the prefix index is of other blocks; build it"):
        Scheduler(BlockManager(10, 4), PrefixIndex(BlockManager(10, 4)))


def test_calls_out_of_order() -> None:
    serving = Serving(10, 4)
    scheduler = serving.scheduler
    parent = added(serving, [1, 2])
    with pytest.raises(SchedulingError, match=r"^there is a sequence 1 already; use a new id$"):
        scheduler.add(Sequence(1, [1], 1, max_tokens=1))
    plan = scheduler.schedule()
    for call in (
        scheduler.schedule,
        lambda: scheduler.restart(b"2"),
        lambda: scheduler.fork(1, Sequence(2, [1, 2, 3], 2, max_tokens=4)),
    ):
        with pytest.raises(SchedulingError, match="while a plan is open; hand back that plan"):
            call()
    for wrong in (StepPlan(plan.chunks), StepPlan(())):
        with pytest.raises(SchedulingError, match=r"^this plan is not the open one; hand back"):
            scheduler.update(wrong, {1: [3]})
        with pytest.raises(SchedulingError, match=r"^this plan is not the open one; hand back"):
            scheduler.fail(wrong)
    for missing in ({}, {1: []}):
        with pytest.raises(SchedulingError, match=r"^no token was sampled for sequence 1; sample"):
            scheduler.update(plan, missing)
    with pytest.raises(SchedulingError, match=r"^tokens were sampled for sequence 8, which the"):
        scheduler.update(plan, {1: [3], 8: [3], 9: [3]})
    assert parent.tokens == [1, 2] and parent.computed == 0
    scheduler.update(plan, {1: [3]})
    with pytest.raises(SchedulingError, match=r"^this plan is not the open one; hand back"):
        scheduler.update(plan, {1: [3]})
    assert parent.tokens == [1, 2, 3] and parent.computed == 2


@pytest.mark.parametrize(
    ("tokens", "salt", "message"),
    [
        ([1, 9, 3], b"", "sequence 2 does not begin with the 2 computed tokens of 1;"),
        ([1, 2, 3], b"b", "sequence 2 does not begin with the 2 computed tokens of 1;"),
        ([1, 2], b"", "sequence 2 has 2 tokens, all of them computed;"),
    ],
)
def test_forks_that_are_refused(tokens: list[int], salt: bytes, message: str) -> None:
    serving = Serving(10, 4)
    added(serving, [1, 2])
    serving.step()
    with pytest.raises(SchedulingError) as error:
        serving.scheduler.fork(1, Sequence(2, tokens, 2, max_tokens=4, salt=salt))
    assert str(error.value).startswith(message)
    serving.check()


def test_states_run_one_way() -> None:
    sequence = Sequence(1, [1], 1, max_tokens=1)
    with pytest.raises(SchedulingError) as error:
        sequence.move("preempted")
    assert str(error.value) == (
        "sequence 1 is waiting and cannot become preempted; possible: running, finished"
    )
    sequence.move("finished")
    with pytest.raises(SchedulingError, match=r"possible: nothing$"):
        sequence.move("running")
