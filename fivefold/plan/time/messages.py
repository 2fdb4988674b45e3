"""What messages between stages add to a pipeline."""

from __future__ import annotations

from fivefold.core.layout import Layout
from fivefold.plan.communication import Group, group, send, stage_link
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.memory.flight import stages_of
from fivefold.plan.memory.place import Place


def message(place: Place, cluster: Cluster, layout: Layout) -> float:
    """Seconds of one message: hidden states of a micro-batch, or their gradient."""
    if layout.pp == 1:
        return 0.0
    link = stage_link(cluster, layout)
    if place.tensor > 1 or place.tp == 1:
        return send(link, place.hidden)
    if not place.software.scatter_sends:
        return send(link, place.gathered)
    tensor: Group = group(cluster, layout, ("tp",))
    return send(link, place.gathered / place.tp) + tensor.gather(place.gathered)


def waited(layout: Layout, microbatches: int, seconds: float, blocking: bool) -> float:
    """Seconds that messages of `seconds` each add to a step.

    Counts of messages in a row are those by which a simulation of the schedule gets longer. 1F1B has no
    slack: from one micro-batch to the next a rank waits for a message there and one back. Other
    schedules wait for them while the pipeline fills and drains alone. `blocking`: a rank computes nothing
    during a message, one for each pass of each of its parts.
    """
    p, m = layout.pp, microbatches
    if p == 1:
        return 0.0
    stages = stages_of(layout.schedule, p, layout.virtual)
    if blocking:
        return 2 * (stages / p * m + p - 1) * seconds
    rows = {
        "gpipe": 2 * (p - 1),
        "1f1b": 2 * m * (p - 1) / p + 2 * (p - 2),
        "interleaved": 2 * (stages - 1),
        "zb-h1": 4 * (p - 1),
        "zbv": 5 * p - 7,
        "dualpipe": 2.5 * p - 3,
        "dualpipe-v": 4 * (p - 1),
    }
    return rows[layout.schedule] * seconds
