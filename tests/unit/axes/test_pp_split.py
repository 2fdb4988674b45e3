"""Splitting layers into stages: the best split, held to trying all; overrides; errors."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.pp.split import LayerCosts, estimate_costs, split_layers, stage_cost
from fivefold.core.errors import LayoutError
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config

COST = st.integers(1, 9).map(float)


@given(st.lists(COST, min_size=1, max_size=9), st.integers(1, 5), COST, COST)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_no_split_is_better(
    layers: list[float], stages: int, embedding: float, head: float
) -> None:
    costs = LayerCosts(tuple(layers), embedding, head)
    if len(layers) < stages:
        with pytest.raises(
            LayoutError, match=f"{len(layers)} layers cannot be split into {stages}"
        ):
            split_layers(costs, stages)
        return
    found = split_layers(costs, stages)
    assert [layer for stage in found for layer in stage] == list(range(len(layers)))
    assert judged(costs, found) == min(
        judged(costs, tuple(map(range, (0, *cut), (*cut, len(layers)))))
        for cut in combinations(range(1, len(layers)), stages - 1)
    )


def judged(costs: LayerCosts, split: tuple[range, ...]) -> tuple[float, float]:
    each = [stage_cost(costs, layers) for layers in split]
    return max(each), sum(cost**2 for cost in each)


def test_equal_layers_divide_evenly_and_the_head_takes_the_place_of_layers() -> None:
    equal = LayerCosts((1.0,) * 12)
    assert [len(s) for s in split_layers(equal, 4)] == [3, 3, 3, 3]
    # The dearest stage counts first, even where another split is more even on the whole.
    uneven = split_layers(LayerCosts((1.0, 5.0, 3.0, 2.0)), 3)
    assert [len(s) for s in uneven] == [1, 1, 2]
    with_head = LayerCosts((1.0,) * 14, head=2.0)
    assert [len(s) for s in split_layers(with_head, 4)] == [4, 4, 4, 2]


def test_costs_of_a_model() -> None:
    config = parse_config({
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    })  # fmt: skip
    decoder = Decoder(config, device="meta")
    costs = estimate_costs(decoder, 33)
    products = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    attention = 2 * 64 * 17  # a token attends to (33 + 1) / 2 keys, for scores and for values
    assert costs.layers == (products + attention,) * 4
    assert (costs.embedding, costs.head) == (64.0, 64_000.0)
    assert [len(s) for s in split_layers(costs, 2)] == [3, 1]
    down = decoder.layers[0].feed_forward.down
    down.weight = torch.nn.Parameter(down.weight[:, :64])  # as tensor parallelism cuts it
    assert estimate_costs(decoder, 33) == costs


def test_a_token_costs_the_experts_that_it_is_sent_to() -> None:
    config = parse_config({
        "model_type": "mixtral", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
    })  # fmt: skip
    products = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 3 * 64 * 128 + 8 * 64  # the router sees each token
    costs = estimate_costs(Decoder(config, device="meta"), 33)
    assert costs.layers == (products + 2 * 64 * 17,) * 2


def test_an_own_split_overrides_and_must_add_up() -> None:
    costs = LayerCosts((1.0,) * 6)
    assert split_layers(costs, 3, [1, 4, 1]) == (range(0, 1), range(1, 5), range(5, 6))
    for counts, said in [
        ([3, 3], "has 2 stages, the pipeline 3; give 3 numbers"),
        ([1, 2, 2], "no split of 6 layers; give 3 numbers, each 1 or more, that add up to 6"),
        ([0, 3, 3], "no split of 6 layers"),
    ]:
        with pytest.raises(LayoutError, match=said):
            split_layers(costs, 3, counts)
