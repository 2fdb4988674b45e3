"""Which engines a cluster could serve a model with: the candidates of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.capacity import room
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.serving.work import work
from fivefold.plan.shape import ModelShape


def engines(shape: ModelShape, cluster: Cluster, like: ServingStrategy) -> list[ServingStrategy]:
    """Layouts of one engine in which the model fits, the fewest devices first.

    `like` gives all but the layout. Tensor ranks stay in a domain of fast links; a pipeline is
    tried where a domain is too small for the model; experts lie on all ranks or are cut by them,
    and where they lie apart, attention may be data parallel. Raises PlanError when none fits.
    """
    found, why = [], None
    for layout in _layouts(shape, cluster):
        strategy = replace(like, layout=layout)
        try:
            work(shape, strategy)
        except PlanError:
            continue  # does not divide the model
        try:
            room(shape, strategy, cluster)
        except PlanError as error:
            why = error
            continue
        found.append(strategy)
    if found:
        whole = [each for each in found if each.layout.pp == 1]
        return sorted(whole or found, key=lambda each: each.engine_ranks)
    raise why or PlanError(
        f"no engine of {cluster.name} divides {shape.name}", "give a layout with --layout"
    )


def _layouts(shape: ModelShape, cluster: Cluster) -> Iterator[Layout]:
    domain = min(cluster.domain, cluster.devices)
    ways = [2**power for power in range(domain.bit_length()) if 2**power <= domain]
    experts = shape.config.moe is not None
    for tp in ways:
        yield Layout(tp=tp)
        if experts and tp > 1:
            yield Layout(tp=tp, ep=tp)
            yield Layout(dp_shard=tp, ep=tp)
    most = max(ways)
    pp = 2
    while pp * most <= cluster.devices and pp <= shape.config.num_layers:
        yield Layout(tp=most, pp=pp)
        if experts:
            yield Layout(tp=most, pp=pp, ep=most)
        pp *= 2
