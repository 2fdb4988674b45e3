"""Who runs when: order, budget, sharing, preemption, forks; and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fivefold.core.errors import PromptError
from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.errors import QueueFullError, SchedulingError
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.engines.serve.scheduling.prefix import PrefixIndex
from fivefold.engines.serve.scheduling.scheduler import Scheduler
from fivefold.engines.serve.scheduling.sequence import Sequence
from tests.unit.serve.scheduling.fake_model import answer
from tests.unit.serve.scheduling.harness import Serving


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(c.sequence.id, c.start, c.count, c.samples) for c in plan.chunks]


def own(first: int, length: int) -> list[int]:
    """A prompt that has nothing in common with those of another `first`."""
    return [first * 1000 + place for place in range(length)]


def added(serving: Serving, tokens: list[int], max_tokens: int = 4, **fields: object) -> Sequence:
    sequence = serving.add(tokens, max_tokens, **fields)
    assert sequence is not None
    return sequence


def test_no_torch_is_imported() -> None:
    modules = [
        "admission",
        "blocks",
        "draft",
        "errors",
        "lines",
        "plan",
        "prefix",
        "scheduler",
        "sequence",
    ]
    imports = ", ".join(f"fivefold.engines.serve.scheduling.{name}" for name in modules)
    code = f"import sys, {imports}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "False False"


def test_prompts_are_read_in_chunks_beside_single_tokens() -> None:
    serving = Serving(100, 4, token_budget=8)
    added(serving, own(1, 5))
    added(serving, own(2, 20))
    assert shape(serving.step()) == [(1, 0, 5, True), (2, 0, 3, False)]
    assert shape(serving.step()) == [(1, 5, 1, True), (2, 3, 7, False)]
    assert shape(serving.step()) == [(1, 6, 1, True), (2, 10, 7, False)]
    assert shape(serving.step()) == [(1, 7, 1, True), (2, 17, 3, True)]
    assert shape(serving.step()) == [(2, 20, 1, True)]
    serving.drain()


def test_single_tokens_come_first_even_behind_a_prompt_in_order() -> None:
    serving = Serving(100, 4, token_budget=4)
    added(serving, own(1, 1), 10)
    serving.step()
    added(serving, own(2, 9), priority=-1)
    assert shape(serving.step()) == [(1, 1, 1, True), (2, 0, 3, False)]
    serving.drain()


def test_classes_first_then_arrivals() -> None:
    serving = Serving(100, 4, max_sequences=1, token_budget=100, aging=1000)
    for first, priority in enumerate((1, 0, 1, 0, -1), start=1):
        added(serving, own(first, 3), 1, priority=priority)
    order = [serving.step().chunks[0].sequence.id for _ in range(5)]
    assert order == [5, 2, 4, 1, 3]


def test_waiting_makes_up_for_priority() -> None:
    """A stream of urgent requests that never ends; the patient one is served all the same."""
    serving = Serving(100, 4, max_sequences=1, token_budget=100, aging=10)
    patient = added(serving, own(1, 3), 2, priority=3)
    for step in range(200):
        added(serving, own(step + 2, 3), 2, priority=0)
        serving.step()
        if patient.state == "finished":
            break
    # 30 steps' arrivals may pass it, each of which takes two steps.
    assert patient.finish == "length" and 30 <= step <= 63


def test_a_long_prompt_is_not_passed_by_short_ones_for_ever() -> None:
    serving = Serving(10, 4, max_sequences=4, token_budget=40)
    for first in range(1, 4):
        added(serving, own(first, 6), first + 1)  # they end in different steps
    serving.step()
    long = added(serving, own(50, 30), 4)
    for first in range(60, 80):
        added(serving, own(first, 6), 2 + first % 3)
        serving.step()
    assert long.finish == "length"
    serving.drain()


def test_the_last_in_order_is_put_back_and_ends_as_if_alone() -> None:
    serving = Serving(6, 2, max_sequences=3, token_budget=30)
    prompts = [[1, 2], [2, 1], [0, 1]]
    sequences = [added(serving, prompt, 7) for prompt in prompts]
    last_put_back = []
    while serving.scheduler.has_work:
        last_put_back += serving.step().preempted
    assert last_put_back and sequences[0] not in last_put_back
    assert serving.scheduler.preemptions == len(last_put_back)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.tokens == prompt + answer(prompt, 7)


def test_one_long_beginning_is_computed_once() -> None:
    """Sixteen requests that share 512 tokens: the others wait a step for the first."""
    serving = Serving(1000, 16, max_sequences=16, token_budget=2048)
    beginning = own(1, 512)
    for each in range(16):
        added(serving, beginning + own(2 + each, 32), 4)
    first = serving.step()
    assert shape(first) == [(1, 0, 544, True)]
    second = serving.step()
    assert second.token_count == 1 + 15 * 32
    assert all(chunk.start == 512 for chunk in second.chunks[1:])
    assert serving.prefix.tokens_asked == 16 * 544 and serving.prefix.tokens_hit == 15 * 512
    assert [s.hit for s in serving.scheduler.running] == [0] + [512] * 15
    serving.drain()


def test_cold_and_warm_give_the_same() -> None:
    serving = Serving(40, 4, token_budget=20)
    prompts = [[1, 2, 0, 1, 2, 2, 1, 0, 1][:n] for n in (9, 8, 5, 9, 4, 1)]

    def answers() -> list[list[int]]:
        sequences = [added(serving, prompt, 6) for prompt in prompts]
        serving.drain()
        return [s.tokens[s.prompt_length :] for s in sequences]

    cold = answers()
    computed = serving.seen["tokens"]
    assert cold == answers() == [answer(prompt, 6) for prompt in prompts]
    assert serving.seen["tokens"] - computed < computed
    assert serving.seen["warm starts"] >= 6


def test_another_turn_finds_the_answer_before_it() -> None:
    serving = Serving(40, 4, token_budget=40)
    first = added(serving, own(1, 6), 7)
    serving.drain()
    second = added(serving, [*first.tokens, 5, 6], 2)
    serving.step()
    assert second.hit == 12  # three full blocks; the last token was never computed


def test_without_matching_all_is_computed() -> None:
    serving = Serving(40, 4, token_budget=40)
    added(serving, own(1, 9), 1)
    serving.drain()
    added(serving, own(1, 9), 1, match_prefix=False)
    assert shape(serving.step()) == [(2, 0, 9, True)]


def test_forks_share_blocks_until_they_write() -> None:
    serving = Serving(20, 4, token_budget=20, max_sequences=3)
    parent = added(serving, own(1, 10), 3)
    serving.step()
    children = [serving.fork(parent, token) for token in (7, 8, 9)]
    assert [child.state for child in children] == ["running", "running", "waiting"]
    assert serving.blocks.owned_count == 3
    plan = serving.step()
    assert len(plan.copies) == 2  # the third to write has the block alone
    assert shape(plan) == [(1, 10, 1, True), (2, 10, 1, True), (3, 10, 1, True)]
    assert serving.blocks.owned_count == 5
    serving.drain()
    assert children[2].hit == 8 and children[2].finish == "length"


def test_a_fork_of_what_has_ended_waits() -> None:
    serving = Serving(20, 4, token_budget=20)
    parent = added(serving, own(1, 6), 4)
    serving.step()
    serving.abort(parent)
    child = serving.fork(parent, 3)
    assert child.state == "waiting"
    serving.drain()
    assert child.finish == "length" and child.hit == 4


def test_a_fork_in_the_middle_of_a_prompt_has_names_of_its_own() -> None:
    serving = Serving(20, 2, token_budget=4)
    parent = added(serving, own(1, 10), 3)
    serving.step()
    assert parent.computed == 4
    child = serving.fork(parent, 7, keep=4)
    serving.drain()
    added(serving, [*own(1, 4), 7, child.tokens[5], 8], 1)
    assert serving.step().chunks[0].start == 6
    added(serving, own(1, 10), 1)
    serving.drain()


def test_new_weights_compute_all_again() -> None:
    serving = Serving(40, 4, token_budget=40)
    sequence = added(serving, own(1, 9), 6)
    serving.step()
    serving.new_weights()
    assert sequence.state == "preempted"
    assert shape(serving.step()) == [(1, 0, 10, True)]
    serving.drain()
    added(serving, own(1, 9), 1)
    assert serving.step().chunks[0].start == 8  # known under the new weights
    serving.new_weights()
    added(serving, own(1, 9), 1)
    assert serving.step().chunks[0].start == 0


def test_blocks_of_an_aborted_sequence_return_with_the_plan_at_the_latest() -> None:
    serving = Serving(10, 4)
    one, other = added(serving, own(1, 8)), added(serving, own(2, 4))
    plan = serving.schedule()
    serving.abort(one)
    assert serving.blocks.owned_count == 3  # the runner writes there
    serving.finish_step(plan)
    assert serving.blocks.owned_count == 1
    serving.abort(other)
    assert serving.blocks.owned_count == 0
    serving.check()


def test_what_is_finished_from_outside() -> None:
    serving = Serving()
    sequence = added(serving, own(1, 3), 9)
    serving.step()
    assert serving.scheduler.finish(sequence.id, "stop")
    assert (sequence.state, sequence.finish) == ("finished", "stop")
    assert serving.scheduler.get(sequence.id) is None and not serving.scheduler.has_work
    assert serving.scheduler.schedule() == StepPlan(())


def test_tokens_beyond_max_tokens_are_cut() -> None:
    scheduler = Serving(10, 4).scheduler
    sequence = Sequence(1, [1, 2], 2, max_tokens=3)
    scheduler.add(sequence)
    scheduler.update(scheduler.schedule(), {1: [3, 4, 5, 6, 7]})
    assert sequence.tokens == [1, 2, 3, 4, 5] and sequence.finish == "length"


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


def test_the_longest_that_fits_runs() -> None:
    serving = Serving(10, 4)
    sequence = added(serving, [1, 2, 3, 4], 37)
    serving.drain()
    assert sequence.output_length == 37 and serving.blocks.free_count == 0


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
