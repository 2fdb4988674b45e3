"""What a rank computes with, against the memory ledger's own count and hand arithmetic."""

from __future__ import annotations

import pytest

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.memory.serving import kv_bytes_per_token, weights_bytes
from fivefold.plan.models.parse import shape
from fivefold.plan.serving.capacity import room
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.serving.work import work

GIB = 2**30


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-2-7b", "tp=1"),
        ("llama-3.1-70b", "tp=8"),
        ("llama-3.1-70b", "tp=4,pp=2"),
        ("qwen3-235b-a22b", "tp=8,ep=8"),
        ("mixtral-8x7b", "dp_shard=8,ep=8"),
        ("deepseek-v3", "tp=8,ep=8"),
        ("gpt-3", "tp=8"),
    ],
)
def test_weights_and_tokens_are_those_of_the_memory_ledger(
    model: str, layout: str, form: str
) -> None:
    ways = Layout.parse(layout)
    found = work(shape(model), ServingStrategy(layout=ways, weights=form, kv=form))
    # Biases and norms of heads are left out here: they cost no time. MLA's unfolding stays in 16
    # bits, as the systems that absorb it have it.
    assert found.weight_bytes == pytest.approx(weights_bytes(shape(model), ways, form), rel=2e-3)
    assert found.token_bytes == pytest.approx(kv_bytes_per_token(shape(model), ways, form))


def test_experts_of_several_ranks_are_cut_where_they_do_not_lie_apart() -> None:
    cut = work(shape("qwen3-235b-a22b"), ServingStrategy(layout=Layout(tp=8)))
    apart = work(shape("qwen3-235b-a22b"), ServingStrategy(layout=Layout(tp=8, ep=8)))
    assert cut.expert_bytes == apart.expert_bytes == 94 * 128 * 3 * 4096 * 1536 * 2 / 8


def test_llama_2_7b_keys_and_values_of_the_worked_case() -> None:
    """2 x 32 layers x 32 heads x 128 dims x 2 bytes = 512 KiB a token; 16 x 4096 of them: 32 GiB."""
    found = work(shape("llama-2-7b"), ServingStrategy())
    assert found.token_bytes == 512 * 1024
    assert found.token_bytes * 16 * 4096 == 32 * GIB


def test_heads_beyond_the_key_value_heads_are_held_twice() -> None:
    eight = work(shape("llama-3.1-70b"), ServingStrategy(layout=Layout(tp=8)))
    sixteen = work(shape("llama-3.1-70b"), ServingStrategy(layout=Layout(tp=16)))
    assert eight.token_bytes == sixteen.token_bytes


def test_room_is_what_weights_steps_and_reserve_leave() -> None:
    found = room(shape("llama-3.1-8b"), ServingStrategy(), cluster("1xH100"))
    left = 0.9 * found.memory - found.weights - found.step - found.reserve
    assert found.cache == pytest.approx(left)
    assert found.blocks == int(left // (32 * 2 * 32 * 8 * 128 * 2))
    assert found.tokens == found.blocks * 32
    assert found.sequences(1000) == pytest.approx(found.tokens / 1000)


def test_narrower_keys_and_values_hold_more() -> None:
    wide, narrow = (
        room(shape("llama-3.1-8b"), ServingStrategy(kv=kv), cluster("1xH100")).tokens
        for kv in ("bf16", "fp8")
    )
    assert narrow == pytest.approx(2 * wide, rel=0.001)


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    with pytest.raises(PlanError, match=r"does not fit: 131\.4 GiB .* GiB are missing") as caught:
        room(shape("llama-3.1-70b"), ServingStrategy(), cluster("8xH100"))
    assert caught.value.mend == "smallest change that fits: tp=2"
    with pytest.raises(PlanError, match="does not fit") as caught:
        room(shape("llama-3.1-70b"), ServingStrategy(), cluster("1xH100"))
    assert caught.value.mend == "smallest change that fits: single with nvfp4"
    with pytest.raises(PlanError) as caught:
        room(shape("deepseek-v3"), ServingStrategy(), cluster("1xL4"))
    assert "in no layout of 1xL4" in caught.value.mend


@pytest.mark.parametrize(
    ("model", "layout", "match"),
    [
        ("llama-3.1-70b", "tp=3", "does not divide the 64 attention heads"),
        ("llama-3.1-70b", "tp=8,ep=8", "has no experts"),
        ("mixtral-8x7b", "tp=4,ep=3", "must divide the 8 experts"),
        ("llama-3.1-8b", "pp=64", "more than the 32 layers"),
    ],
)
def test_ways_that_do_not_divide_the_model(model: str, layout: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        work(shape(model), ServingStrategy(layout=Layout.parse(layout)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weights": "fp9"}, "fp9"),
        ({"kv": "int4"}, "keys and values"),
        ({"layout": Layout(cp=2)}, "cp=2"),
        ({"max_sequences": 0}, "max_sequences=0"),
        ({"memory_share": 1.5}, "memory_share"),
        ({"token_budget": 0}, "token_budget"),
    ],
)
def test_strategies_that_cannot_work(options: dict[str, object], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        ServingStrategy(**options)  # type: ignore[arg-type]
