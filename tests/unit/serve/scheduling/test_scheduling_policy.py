"""Who runs when: order, budget, sharing, preemption, forks."""

from __future__ import annotations

import subprocess
import sys

from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.engines.serve.scheduling.sequence import Sequence
from tests.unit.serve.scheduling.fake_model import answer
from tests.unit.serve.scheduling.harness import Serving, added


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(c.sequence.id, c.start, c.count, c.samples) for c in plan.chunks]


def own(first: int, length: int) -> list[int]:
    """A prompt that has nothing in common with those of another `first`."""
    return [first * 1000 + place for place in range(length)]


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


def test_the_longest_that_fits_runs() -> None:
    serving = Serving(10, 4)
    sequence = added(serving, [1, 2, 3, 4], 37)
    serving.drain()
    assert sequence.output_length == 37 and serving.blocks.free_count == 0
