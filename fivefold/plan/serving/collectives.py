"""Collectives of a step: mostly small, so that latency counts more than bandwidth.

All-reduce inside a domain: each rank reads what all others have (one shot: one message, n - 1
parts) or reduces its share and gathers the rest (two shots); whichever is faster, as serving
systems choose. Across domains a ring of domains joins the results. All-to-all: a rank sends the
parts that are not its own.
"""

from __future__ import annotations

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.link import Link


def all_reduce(cluster: Cluster, ranks: int, stride: int, size: float) -> float:
    """Seconds until `ranks` have the sum of `size` bytes each."""
    if ranks == 1:
        return 0.0
    inside, domains = cluster.spread(ranks, stride)
    seconds = _reduce(cluster.inside, inside, size)
    if domains > 1:
        seconds += _reduce(cluster.between, domains, size / inside)
    return seconds


def all_to_all(cluster: Cluster, ranks: int, stride: int, size: float) -> float:
    """Seconds until each of `ranks` has sent `size` bytes, evenly to all."""
    if ranks == 1:
        return 0.0
    inside, domains = cluster.spread(ranks, stride)
    seconds = cluster.inside.start + size * (inside - 1) / ranks / cluster.inside.rate
    if domains > 1:
        outside = size * (ranks - inside) / ranks
        seconds = max(seconds, cluster.between.start + outside / cluster.between.rate)
    return seconds


def send(cluster: Cluster, distance: int, size: float) -> float:
    """Seconds for `size` bytes to a rank `distance` away."""
    link = cluster.inside if distance < cluster.domain else cluster.between
    return link.start + size / link.rate


def _reduce(link: Link, ranks: int, size: float) -> float:
    if ranks == 1:
        return 0.0
    one_shot = link.start + link.latency + (ranks - 1) * size / link.rate
    two_shots = link.start + 2 * link.latency + 2 * (ranks - 1) / ranks * size / link.rate
    return min(one_shot, two_shots)
