"""Keys and values on their way from the engine that read a prompt to the one that answers."""

from __future__ import annotations

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.serving.work import work
from fivefold.plan.shape import ModelShape


def transfer_bytes(shape: ModelShape, strategy: ServingStrategy, tokens: float) -> float:
    """Keys and values of a prompt that one device of the reading engine sends."""
    return work(shape, strategy).token_bytes * tokens


def transfer_seconds(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, tokens: float
) -> float:
    """Seconds, all devices of an engine sending at once.

    Over the network between domains: engines lie in domains of their own, unless one domain holds
    the whole cluster. What overlaps with reading the prompt (layer by layer) is not deducted.
    """
    link = cluster.inside if cluster.domain >= cluster.devices else cluster.between
    return link.latency + transfer_bytes(shape, strategy, tokens) / link.rate
