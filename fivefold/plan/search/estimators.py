"""The planner's own estimators, as a search uses them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.memory.block import block
from fivefold.plan.memory.ledger import CONTEXT, FRAGMENTS, ledger
from fivefold.plan.memory.place import Place
from fivefold.plan.search.job import Estimators, Pass
from fivefold.plan.shape import ModelShape
from fivefold.plan.time.step import pieces, step_time
from fivefold.plan.workload import Software, Strategy, Training


@cache
def estimators() -> Estimators:
    """Memory from `plan.memory`, time from `plan.time`."""
    return Estimators(ledger, step_time, one_pass, kept, CONTEXT, 1 + FRAGMENTS)


def one_pass(
    shape: ModelShape, training: Training, strategy: Strategy, cluster: Cluster, software: Software
) -> Pass:
    """Of the whole model: what the parts of any pipeline add up to, or more."""
    once = replace(training, global_batch=strategy.micro_batch * strategy.layout.dp)
    passes = pieces(shape, once, strategy, cluster, software).passes
    return Pass(
        sum(each.forward.seconds for each in passes),
        sum(each.input.seconds + each.again.seconds for each in passes),
        sum(each.weight.seconds for each in passes),
    )


def kept(
    shape: ModelShape, training: Training, strategy: Strategy, software: Software, sparse: bool
) -> float:
    """Of a layer, dense or `sparse`."""
    place = Place.of(shape, training, strategy, software)
    return float(block(place, sparse, "accumulate").totals[0])
