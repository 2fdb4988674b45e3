"""Seconds of a step, against hand arithmetic and what must grow with what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.core.layout import Layout
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.efficiency import Efficiency
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models.parse import shape
from fivefold.plan.serving.batch import Batch, prompt_batch
from fivefold.plan.serving.collectives import all_reduce, all_to_all
from fivefold.plan.serving.software import TENSORRT_LLM
from fivefold.plan.serving.speculation import Speculation
from fivefold.plan.serving.step import (
    StepModel,
    decode_step,
    imbalance,
    prefill,
    touched_experts,
)
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.serving.work import work

LLAMA, H100 = shape("llama-3.1-8b"), cluster("8xH100")
ONE = ServingStrategy()
# All of what the data sheet says is reached, and nothing costs a launch.
IDEAL = replace(
    H100,
    device=replace(H100.device, efficiency=Efficiency(1.0, 0.0, 1.0, 1.0, 0.0, "ideal")),
)
BARE = replace(ONE, system=replace(ONE.system, host=0.0))


def test_one_answer_takes_what_reading_the_weights_takes() -> None:
    """On an ideal device: 15.0 GiB less the embedding, over 3.35 TB/s, and little for the rest."""
    read = work(LLAMA, BARE).weight_bytes - 128_256 * 4096 * 2
    assert decode_step(LLAMA, BARE, IDEAL, 1, 1) == pytest.approx(read / 3.35e12, rel=0.01)


def test_a_context_costs_its_keys_and_values() -> None:
    short, long = (decode_step(LLAMA, BARE, IDEAL, 8, n) for n in (1000, 9000))
    moved = 8 * 8000 * 2 * 32 * 8 * 128 * 2
    assert long - short == pytest.approx(moved / 3.35e12, rel=1e-6)


def test_a_long_prompt_takes_its_operations() -> None:
    wide = replace(BARE, token_budget=4096)
    seconds = StepModel(LLAMA, wide, IDEAL).cost(prompt_batch(0, 4096, last=True))
    layers = work(LLAMA, wide).matrices
    wanted = sum(2 * 4096 * m.elements * m.layers for m in layers) / 989.4e12
    assert seconds.products == pytest.approx(wanted, rel=1e-6)
    pairs = 4096 * 4097 / 2
    assert seconds.attention == pytest.approx(32 * pairs * 4 * 32 * 128 / 989.4e12, rel=1e-6)


def test_a_prompt_in_chunks_costs_more_and_attends_to_all() -> None:
    whole = prefill(LLAMA, replace(ONE, token_budget=4096), H100, 4096)
    parts = prefill(LLAMA, replace(ONE, token_budget=512), H100, 4096)
    assert whole < parts < 2 * whole


def test_what_the_cache_holds_is_not_read_again() -> None:
    wide = replace(ONE, token_budget=8192)
    cold, warm = (prefill(LLAMA, wide, H100, 4096, cached=n) for n in (0, 3584))
    assert warm < cold / 4


def test_tensor_parallelism_divides_what_is_read_and_adds_what_is_sent() -> None:
    one, eight = (
        StepModel(LLAMA, ServingStrategy(layout=Layout(tp=tp)), H100).cost(
            Batch(rows=1, context=1000, sampled=1)
        )
        for tp in (1, 8)
    )
    assert eight.products == pytest.approx(one.products / 8, rel=0.01)
    assert one.communication == 0 < eight.communication
    assert eight.launches == one.launches


def test_a_pipeline_answers_no_faster_alone_but_passes_groups_around() -> None:
    shallow, deep = (ServingStrategy(layout=Layout(tp=2, pp=pp)) for pp in (1, 4))
    alone = [decode_step(LLAMA, each, H100, 1, 1000) for each in (shallow, deep)]
    assert alone[1] >= alone[0] * 0.99
    many = [decode_step(LLAMA, each, H100, 256, 4000) for each in (shallow, deep)]
    assert many[1] < many[0]


def test_narrow_weights_are_read_faster() -> None:
    wide, narrow = (
        decode_step(LLAMA, ServingStrategy(weights=form), H100, 1, 100) for form in ("bf16", "fp8")
    )
    assert narrow < 0.7 * wide


def test_experts_that_are_met_are_read() -> None:
    """One token of 8 of 128 experts meets 8; a thousand tokens meet all."""
    mixture = shape("qwen3-235b-a22b")
    found = work(mixture, ServingStrategy()).experts
    assert found is not None
    assert touched_experts(found, 1) == pytest.approx(8)
    assert touched_experts(found, 1000) == pytest.approx(128)
    strategy = ServingStrategy(layout=Layout(tp=8), weights="fp8")
    model = StepModel(mixture, strategy, cluster("8xH200"))
    few, many = (model.cost(Batch(rows=n, context=n, sampled=n)).experts for n in (1, 64))
    assert many / few == pytest.approx(touched_experts(found, 64) / 8, rel=0.1)


def test_the_busiest_rank_of_few_tokens_has_much_more_than_the_mean() -> None:
    found = work(shape("deepseek-v3"), ServingStrategy(layout=Layout(tp=8, ep=8))).experts
    assert found is not None
    assert imbalance(found, 4) > 1.5 > 1.1 > imbalance(found, 8192) > 1
    cut = work(shape("deepseek-v3"), ServingStrategy(layout=Layout(tp=8))).experts
    assert cut is not None and imbalance(cut, 4) == 1


def test_attention_dp_sends_tokens_to_their_experts() -> None:
    strategy = ServingStrategy(layout=Layout(dp_shard=8, ep=8), weights="fp8")
    cost = StepModel(shape("deepseek-v3"), strategy, cluster("8xH200")).cost(
        Batch(rows=64, context=64_000, sampled=64)
    )
    assert cost.communication > 0
    together = replace(strategy, layout=Layout(tp=8, ep=8))
    other = StepModel(shape("deepseek-v3"), together, cluster("8xH200")).cost(
        Batch(rows=64, context=64_000, sampled=64)
    )
    assert cost.attention < other.attention  # latents are held once, not eight times


def test_steps_that_read_prompts_are_not_captured() -> None:
    found = StepModel(LLAMA, ONE, H100)
    decode = found.cost(Batch(rows=4, context=400, sampled=4))
    mixed = found.cost(Batch(rows=4, context=400, prompt=64, pairs=2080, sampled=5))
    assert mixed.launches > decode.launches


def test_a_window_bounds_what_is_attended_to() -> None:
    gemma = shape("gemma-3-27b")
    strategy = ServingStrategy(layout=Layout(tp=2))
    found = StepModel(gemma, strategy, H100)
    short, long = (
        found.cost(Batch(rows=1, context=n, sampled=1)).attention for n in (1024, 32 * 1024)
    )
    assert long < 10 * short  # five of six layers look back 1,024 tokens


def test_speculation_divides_a_step_by_its_tokens() -> None:
    drafting = replace(ONE, speculation=Speculation(0.8, 4, 0.0))
    plain, faster = (decode_step(LLAMA, each, H100, 1, 1000) for each in (ONE, drafting))
    assert faster == pytest.approx(plain / Speculation(0.8, 4).tokens, rel=0.05)
    prompt = prompt_batch(0, 512, last=True)
    assert StepModel(LLAMA, drafting, H100).seconds(prompt) == StepModel(LLAMA, ONE, H100).seconds(
        prompt
    )


def test_what_is_kept_of_a_step_is_what_is_computed() -> None:
    found = StepModel(shape("gemma-3-27b"), ServingStrategy(layout=Layout(tp=2, pp=2)), H100)
    for context in (100.0, 9000.0, 100.0):
        batch = Batch(rows=3, context=context, sampled=3)
        assert found.seconds(batch) == pytest.approx(found.cost(batch).total, rel=1e-12)


def test_kernels_of_a_system_that_fuses_less_cost_more() -> None:
    fused = replace(ONE, system=TENSORRT_LLM)
    plain = replace(ONE, system=replace(TENSORRT_LLM, kernels=1.0))
    assert decode_step(LLAMA, fused, H100, 1, 1) < decode_step(LLAMA, plain, H100, 1, 1)


def test_collectives() -> None:
    assert all_reduce(H100, 1, 1, 1e6) == 0
    link = H100.inside
    large = 1e9
    assert all_reduce(H100, 8, 1, large) == pytest.approx(2 * 7 / 8 * large / link.rate, rel=0.01)
    assert all_reduce(H100, 8, 1, 8.0) == pytest.approx(link.start + link.latency, rel=0.01)
    wide = cluster("2x8xH100")
    assert all_reduce(wide, 16, 1, 1e8) > all_reduce(wide, 8, 1, 1e8)
    assert (
        all_to_all(wide, 16, 1, 1e8)
        > all_to_all(wide, 8, 1, 1e8)
        > 0
        == all_to_all(wide, 1, 1, 1e8)
    )


def test_a_device_without_a_format_computes_in_the_next() -> None:
    old: Device = cluster("1xA100-80GB").device
    strategy = ServingStrategy(weights="fp8")
    found = StepModel(LLAMA, strategy, cluster("1xA100-80GB"))
    assert "fp8" not in old.peak
    assert found.seconds(Batch(rows=1, context=1, sampled=1)) > 0
