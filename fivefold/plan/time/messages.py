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

    1F1B has no slack: from one micro-batch to the next a rank waits for a message there and one back.
    So has every schedule whose ranks compute nothing while they send; those with several parts
    send for each. Where messages travel beside computation, schedules with more under way than 1F1B
    wait for them while the pipeline fills and drains alone.
    """
    if layout.pp == 1:
        return 0.0
    borders = stages_of(layout.schedule, layout.pp, layout.virtual) - 1
    each = borders / (layout.pp - 1)
    fill = 2.0 * (layout.pp - 1)
    if layout.schedule == "gpipe":
        return (fill + (2.0 * (microbatches - 1) if blocking else 0.0)) * seconds
    if blocking:
        return (fill + 2.0 * each * (microbatches - 1)) * seconds
    if layout.schedule in ("1f1b", "zb-h1"):
        return (fill + 2.0 * max(0, microbatches - layout.pp)) * seconds
    return fill * seconds
