"""The discrete-event simulation: the real scheduler under a clock that only steps move."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.engines.serve.load.workload import Fit
from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.prefix import PrefixIndex
from fivefold.engines.serve.scheduling.scheduler import Scheduler
from fivefold.engines.serve.scheduling.sequence import Sequence
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models.parse import shape
from fivefold.plan.serving.batch import Batch
from fivefold.plan.serving.engine import SimulatedEngine
from fivefold.plan.serving.policy import PromptsFirst
from fivefold.plan.serving.simulate import Simulation, simulate
from fivefold.plan.serving.software import SGLANG, VLLM
from fivefold.plan.serving.step import decode_step, model, prefill
from fivefold.plan.serving.strategy import ServingStrategy, Split
from fivefold.plan.serving.traffic import Demand, Traffic, closed, every, faster, steady, trace
from fivefold.plan.serving.transfer import transfer_bytes, transfer_seconds

LLAMA, H100 = shape("llama-3.1-8b"), cluster("8xH100")
ONE = ServingStrategy(system=VLLM)


def run(strategy: ServingStrategy | Split, traffic: Traffic) -> Simulation:
    return simulate(LLAMA, strategy, H100, traffic)


def one(prompt: int, answer: int) -> Traffic:
    return Traffic((Demand(0.0, answer, (("own", 0, prompt),)),), "one")


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    found = run(ONE, one(1000, 11)).outcomes[0]
    assert found.ttft == pytest.approx(VLLM.front + prefill(LLAMA, ONE, H100, 1000))
    steps = [decode_step(LLAMA, ONE, H100, 1, 1001 + n) for n in range(10)]
    assert found.tpot == pytest.approx(sum(steps) / 10)
    assert found.gaps == pytest.approx(steps)
    assert found.completion_tokens == 11


def test_a_long_prompt_is_read_in_chunks_of_the_budget() -> None:
    small = replace(ONE, token_budget=256)
    found = run(small, one(1000, 1)).outcomes[0]
    assert found.ttft == pytest.approx(VLLM.front + prefill(LLAMA, small, H100, 1000))


def test_users_ask_again_when_they_are_answered() -> None:
    found = run(ONE, closed(4, 200, 20, requests=12))
    summary = found.summary()
    assert summary.answered == 12 and summary.most_at_once == 4
    assert summary.output_tokens == 12 * 20
    starts = sorted(each.scheduled for each in found.outcomes)
    ends = sorted(each.ended for each in found.outcomes)
    assert starts[4:] == pytest.approx(ends[:8])


def test_equal_runs_are_equal() -> None:
    first, second = (run(ONE, steady(3.0, 500, 50, requests=40, spread=0.5)) for _ in range(2))
    assert [o.ended for o in first.outcomes] == [o.ended for o in second.outcomes]


def test_a_shared_beginning_is_computed_once() -> None:
    alone = run(ONE, steady(1.0, 2000, 8, requests=30))
    shared = run(ONE, steady(1.0, 2000, 8, requests=30, shared_prefix=1600))
    assert alone.hit_rate == 0
    assert shared.hit_rate == pytest.approx(0.8 * 29 / 30, abs=0.02)
    mean = [s.summary().latencies["ttft"].mean for s in (alone, shared)]  # type: ignore[union-attr]
    assert mean[1] < mean[0]


def test_a_cache_that_is_too_small_puts_answers_back() -> None:
    engine = SimulatedEngine(LLAMA, ONE, H100, blocks=36)
    for id in range(4):
        engine.add(id, [id] * 300, 100)
    now, ended = 0.0, set()
    while engine.has_work:
        now += engine.begin(now)
        ended |= set(engine.end(now)[1])
        engine.scheduler.invariants()
    assert ended == {0, 1, 2, 3}
    assert engine.scheduler.preemptions > 0


def test_a_request_that_never_fits_is_refused() -> None:
    engine = SimulatedEngine(LLAMA, ONE, H100, blocks=4)
    with pytest.raises(PlanError, match="more than the 128 tokens"):
        engine.add(0, [1] * 100, 100)


def test_more_load_means_longer_waits() -> None:
    slow, fast = (run(ONE, steady(rate, 2000, 100, requests=80)).summary() for rate in (1.0, 20.0))
    for name in ("ttft", "tpot"):
        assert fast.latencies[name].mean > slow.latencies[name].mean  # type: ignore[union-attr]


def test_copies_share_the_load() -> None:
    two = replace(ONE, layout=Layout(dp_replicate=2))
    traffic = steady(20.0, 2000, 100, requests=80)
    single, double = run(ONE, traffic), run(two, traffic)
    assert double.devices == 2 and len(double.busy) == 2
    assert double.summary().latencies["ttft"].mean < single.summary().latencies["ttft"].mean  # type: ignore[union-attr]


def split(prefills: int = 1, decodes: int = 1) -> Split:
    return Split(ONE, prefills, ONE, decodes)


def test_apart_the_first_token_comes_before_the_transfer() -> None:
    found = run(split(), one(1000, 11)).outcomes[0]
    assert found.ttft == pytest.approx(VLLM.front + prefill(LLAMA, ONE, H100, 1000))
    moved = transfer_seconds(LLAMA, ONE, H100, 1000)
    steps = [decode_step(LLAMA, ONE, H100, 1, 1001 + n) for n in range(10)]
    assert found.gaps == pytest.approx([moved + steps[0], *steps[1:]])
    assert found.completion_tokens == 11
    assert transfer_bytes(LLAMA, ONE, 1000) == 1000 * 2 * 32 * 8 * 128 * 2


def test_apart_sglang_shows_the_first_token_from_the_second_engine() -> None:
    other = replace(ONE, system=SGLANG)
    found = run(Split(other, 1, other, 1), one(1000, 11)).outcomes[0]
    assert found.ttft is not None
    assert found.ttft > SGLANG.front + prefill(LLAMA, other, H100, 1000)
    assert found.completion_tokens == 11


def test_apart_prompts_do_not_hold_up_answers() -> None:
    traffic = steady(8.0, 4000, 200, requests=60)
    together, apart = run(ONE, traffic).summary(), run(split(), traffic).summary()
    assert apart.answered == 60
    longest = [s.latencies["itl"].percentiles[99] for s in (together, apart)]  # type: ignore[union-attr]
    assert longest[1] < longest[0] / 2


def test_an_answer_of_one_token_needs_no_second_engine() -> None:
    found = run(split(), one(100, 1)).outcomes[0]
    assert found.completion_tokens == 1 and found.e2e == found.ttft


def test_prompts_first_reads_all_prompts_before_an_answer_goes_on() -> None:
    users = closed(8, 1000, 20, requests=8)
    mixed = run(replace(ONE, token_budget=1024), users).outcomes
    first = run(replace(ONE, token_budget=1024, system=replace(VLLM, order="prompts-first")), users)
    assert max(o.first or 0 for o in first.outcomes) < min(
        (o.first or 0) + o.gaps[0] for o in first.outcomes
    )
    assert mixed[0].gaps[0] < first.outcomes[0].gaps[0]


def test_prompts_first_keeps_what_the_scheduler_promises() -> None:
    draw = random.Random(3)
    blocks = BlockManager(24, 4)
    scheduler = Scheduler(
        blocks, PrefixIndex(blocks), max_sequences=4, token_budget=8, draft=PromptsFirst
    )
    added = 0
    while added < 60 or scheduler.has_work:
        if added < 60 and draw.random() < 0.5:
            length = draw.randrange(1, 20)
            tokens = [draw.randrange(3) for _ in range(length)]
            scheduler.add(Sequence(added, tokens, length, draw.randrange(1, 12)))
            added += 1
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule()
        assert plan.chunks and plan.token_count <= max(8, len(plan.chunks))
        answers = [c for c in plan.chunks if c.start >= c.sequence.prompt_length]
        assert not answers or all(c.count == 1 for c in plan.chunks)
        scheduler.update(plan, {c.sequence.id: [1] for c in plan.chunks if c.samples})
        scheduler.invariants()


def test_new_requests_wait_for_the_next_look() -> None:
    asked = Traffic(
        tuple(Demand(at, 400, (("own", n, 64),)) for n, at in enumerate((0.0, 0.5))), "two"
    )
    often = run(ONE, asked).outcomes[1]
    seldom = run(replace(ONE, system=replace(VLLM, poll=50)), asked).outcomes[1]
    assert often.ttft is not None and seldom.ttft is not None
    assert often.ttft < seldom.ttft < often.ttft + 51 * decode_step(LLAMA, ONE, H100, 1, 500)


def test_traffic_is_what_was_asked_for() -> None:
    found = steady(5.0, 100, 10, requests=50)
    assert found.rate == pytest.approx(5.0)
    assert (found.input_tokens, found.output_tokens) == (100, 10)
    assert faster(found, 2.0).rate == pytest.approx(10.0)
    assert every(found, 5, 1).demands == found.demands[1::5]
    varied = closed(8, 1000, 1000, requests=400, shortest=0.8)
    lengths = [each.input for each in varied.demands]
    assert min(lengths) >= 790 and max(lengths) <= 1000
    assert varied.input_tokens == pytest.approx(900, rel=0.02)


@pytest.mark.parametrize("bad", [{"rate": 0.0}, {"input_tokens": 0}, {"output_tokens": -1}])
def test_traffic_that_is_none(bad: dict[str, float]) -> None:
    with pytest.raises(PlanError):
        steady(**{"rate": 1.0, "input_tokens": 10, "output_tokens": 10} | bad)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no request"):
        Traffic((), "none")
    with pytest.raises(PlanError, match="shortest"):
        closed(1, 10, 10, shortest=0.0)


def test_recorded_traces(shared_data: Path) -> None:
    path = shared_data / "azure-llm-trace-2023" / "AzureLLMInferenceTrace_conv.csv"
    azure = trace("azure", path, requests=100)
    found = run(ONE, azure).summary({"ttft": 1.0})
    assert found.answered == 100 and found.goodput_share == 1.0
    assert not azure.shares
    path = shared_data / "mooncake-trace" / "synthetic_trace.jsonl"
    mooncake = trace("mooncake", path, requests=60, fit=Fit(0.1))
    assert mooncake.shares
    shared = run(ONE, mooncake)
    assert shared.summary().answered == 60 and shared.hit_rate > 0.01
    with pytest.raises(PlanError, match="azure, mooncake"):
        trace("azur", path)


def test_a_step_of_the_simulation_is_the_roofline_of_its_plan() -> None:
    """Two answers and a chunk: rows, context and pairs are counted as the formula wants them."""
    engine = SimulatedEngine(LLAMA, ONE, H100)
    for id, length in enumerate((100, 200)):
        engine.add(id, [id] * length, 10)
    engine.begin(0.0)
    engine.end(0.0)
    engine.add(2, [2] * 50, 10)
    wanted = Batch(2, 101 + 201, 50, 50 * 51 / 2, 0, 3)
    assert engine.begin(0.0) == model(LLAMA, ONE, H100).seconds(wanted)
