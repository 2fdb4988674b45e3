"""Which layers each stage has, by the same split that training makes, without torch."""

from __future__ import annotations

from functools import lru_cache

from fivefold.axes.pp.split import LayerCosts, split_layers
from fivefold.core.layout import Layout
from fivefold.observe.flops import attended_keys
from fivefold.plan.memory.parameters import layer_weights
from fivefold.plan.shape import ModelShape
from fivefold.plan.workload import Software


@lru_cache(maxsize=1024)
def stage_layers(
    shape: ModelShape, sequence: int, stages: int, counts: tuple[int, ...] | None = None
) -> tuple[range, ...]:
    """Layers of each part of the model. Raises LayoutError for counts that do not add up."""
    if stages == 1:
        return (range(shape.config.num_layers),)
    return split_layers(layer_costs(shape, sequence), stages, counts)


def layers_of(
    shape: ModelShape, sequence: int, stages: int, layout: Layout, software: Software
) -> tuple[range, ...]:
    """As the layout says, evenly where the software has it so, or by cost."""
    counts, layers = layout.stage_layers, shape.config.num_layers
    if counts is None and software.even_stages and layers % stages == 0:
        counts = (layers // stages,) * stages
    return stage_layers(shape, sequence, stages, counts)


@lru_cache(maxsize=256)
def layer_costs(shape: ModelShape, sequence: int) -> LayerCosts:
    """As `axes.pp.split.estimate_costs` has them from a decoder's modules."""
    config = shape.config
    costs = []
    for layer, window in enumerate(config.windows):
        keys = attended_keys(sequence, window)
        elements = _met(shape, config.is_sparse(layer))
        costs.append(elements + config.num_heads * (config.head_dim + config.value_dim) * keys)
    head = float(config.hidden_size * config.vocab_size)
    return LayerCosts(tuple(costs), float(config.hidden_size), head)


@lru_cache(maxsize=256)
def _met(shape: ModelShape, sparse: bool) -> int:
    """Elements of matrices that a token is multiplied by."""
    total, moe = 0, shape.config.moe
    for weight in layer_weights(shape, sparse):
        if not weight.matrix:
            continue
        if weight.expert:
            assert moe is not None, "experts have a number"
            total += weight.elements // moe.experts * moe.top_k
        else:
            total += weight.elements
    return total
