"""Which layers go to which stage: neighbours together, the dearest stage as cheap as can be.

A pipeline moves at the pace of its slowest stage, so that is what is minimised; among the splits that
do, the one whose stages are most alike. The first stage also embeds, the last has the head and the
loss, which for a large vocabulary costs as much as several layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.core.errors import LayoutError
from fivefold.observe.flops import attended_keys

if TYPE_CHECKING:  # a plan splits layers without torch
    from fivefold.model.decoder import Decoder


@dataclass(frozen=True)
class LayerCosts:
    """Of one token: multiply-adds of each layer, of the embedding and of head and loss."""

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0


def estimate_costs(decoder: Decoder, sequence_length: int) -> LayerCosts:
    """From the shapes of the weights and the attention's square.

    Of stacked experts [X,F,D] a token passes through as many as the model routes it to. Looking a token
    up in the embedding reads one row. Other axes may have cut this decoder's weights already, which
    changes nothing: they cut all layers alike, and the shapes come from its config.
    """
    from fivefold.model.counting import active_elements

    config = decoder.config
    layers = []
    for elements, window in zip(active_elements(config), config.windows, strict=True):
        keys = attended_keys(sequence_length, window)
        layers.append(elements + config.num_heads * (config.head_dim + config.value_dim) * keys)
    head = float(config.hidden_size * config.vocab_size)
    return LayerCosts(tuple(layers), float(config.hidden_size), head)


def split_layers(
    costs: LayerCosts, stages: int, counts: Sequence[int] | None = None
) -> tuple[range, ...]:
    """The layers of each stage. `counts` (layers a stage) overrides the estimate.

    Raises LayoutError for fewer layers than stages and for counts that do not add up.
    """
    layers = len(costs.layers)
    if counts is not None:
        return _ranges(_checked(counts, layers, stages))
    if layers < stages:
        raise LayoutError(
            f"{layers} layers cannot be split into {stages} pipeline stages",
            f"use at most {layers} stages (pp times the stages a rank)",
        )
    return _ranges(_balanced(costs, stages))


def stage_cost(costs: LayerCosts, layers: range) -> float:
    """What a stage costs that has `layers`, with the embedding or head if it is at that end."""
    cost = sum(costs.layers[i] for i in layers)
    if layers.start == 0:
        cost += costs.embedding
    if layers.stop == len(costs.layers):
        cost += costs.head
    return cost


def _balanced(costs: LayerCosts, stages: int) -> list[int]:
    """Layers a stage: first the least possible dearest stage, then the least sum of squares."""
    total = len(costs.layers)
    cost = _costs(costs)
    dearest = [
        cost[0, b] if b else 0.0 for b in range(total + 1)
    ]  # of the layers before b, in 1 stage
    for stage in range(2, stages + 1):
        dearest = [_least(dearest, cost, stage - 1, b) for b in range(total + 1)]
    limit = dearest[total] * (1 + 1e-12)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(stages):
        reached: dict[int, tuple[float, list[int]]] = {}
        for a, (squares, counts) in best.items():
            for b in range(a + 1, total + 1):
                if cost[a, b] <= limit:
                    new = squares + cost[a, b] ** 2
                    if b not in reached or new < reached[b][0]:
                        reached[b] = new, [*counts, b - a]
        best = reached
    return best[total][1]


def _costs(costs: LayerCosts) -> dict[tuple[int, int], float]:
    """`stage_cost` of every run of layers a to b, each from the one that is shorter by a layer."""
    total = len(costs.layers)
    found = {}
    for a in range(total):
        layers = 0.0
        for b in range(a + 1, total + 1):
            layers += costs.layers[b - 1]
            cost = layers + costs.embedding if a == 0 else layers
            found[a, b] = cost + costs.head if b == total else cost
    return found


def _least(
    dearest: Sequence[float], cost: dict[tuple[int, int], float], first: int, b: int
) -> float:
    """The dearest stage at least, if the last one is of layers a to b, over a from `first` on.

    What is before `a` gets dearer with it and the last stage cheaper: the best is where they cross.
    """
    if b <= first:
        return float("inf")
    low, high = first, b - 1
    while low < high:
        middle = (low + high) // 2
        if dearest[middle] >= cost[middle, b]:
            high = middle
        else:
            low = middle + 1
    best = max(dearest[low], cost[low, b])
    return min(best, max(dearest[low - 1], cost[low - 1, b])) if low > first else best


def _checked(counts: Sequence[int], layers: int, stages: int) -> list[int]:
    if len(counts) != stages:
        raise LayoutError(
            f"the split {list(counts)} has {len(counts)} stages, the pipeline {stages}",
            f"give {stages} numbers of layers",
        )
    if sum(counts) != layers or min(counts) < 1:
        raise LayoutError(
            f"the split {list(counts)} is no split of {layers} layers",
            f"give {stages} numbers, each 1 or more, that add up to {layers}",
        )
    return list(counts)


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    found, start = [], 0
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return tuple(found)
