"""How long collectives take, by which links the ranks of an axis have between them.

A collective over n ranks moves b bytes, the size of the whole tensor (of an all-gather the result):

    all-gather, reduce-scatter   (n-1) messages of b/n bytes, in a ring
                                 or one, where switches multicast
    all-reduce                   both: 2 (n-1) messages; or up and down a tree: 2 log2 n messages
    all-to-all                   every rank sends (n-1)/n of its b bytes, to all others at once
    send                         one message

Ranks in one domain (NVLink) use `inside`. Where a group spreads over d domains, i ranks in each, its
ring enters and leaves every domain over the ports of all i ranks, so that each port carries 1/i of what
a ring of single ranks would: the time is that of the slower link, plus all messages' latency. NCCL
takes the ring for large messages and the tree for small ones over many nodes; here the faster is taken.
Rings: Patarasuk and Yuan 2009; trees: Sanders, Speck and Traeff 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.core.layout import Layout
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.link import Link

# NCCL has protocols for small and for large messages. Those for small ones send flags with the data: no
# step waits for a fence, at half the rate (LL; LL128 is between). The step of large ones: from all-reduces of
# 1 to 1024 MB on 2 to 8 A100 (vTrain's published tables): 4 to 6 us a step beyond the wire's time.
# Across domains every rank of a server runs a ring of its own at the same time, and shares switches.
# Korthikanti et al. (2022): 8 copies of 530B on 2,240 A100 sum their gradients in 1.3 s: 10 GB/s of a port of
# 25; Narayanan et al. (2021): 12.9 TB/s of bisection on 3,072 A100, 8.4 GB/s of a device.
SHARED = 0.6
SMALL_RATE = 0.5
# Of a device's processors, those that carry traffic beside computation: 20 of an H800's 132 (DeepSeek-V3,
# 2412.19437, section 3.2.2); NCCL's channels are as many by default.
CARRYING = 0.15
LARGE_STEP = 5e-6


@dataclass(frozen=True)
class Group:
    """`inside` ranks in each of `domains` domains that take part in one collective."""

    inside: int
    domains: int
    near: Link
    far: Link

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.inside * self.domains

    @property
    def crosses(self) -> bool:
        """Whether it leaves a domain."""
        return self.domains > 1

    @property
    def where(self) -> str:
        """The link it is bound to, in words."""
        return self.link.name

    @property
    def link(self) -> Link:
        """The slowest that it uses."""
        return self.far if self.crosses else self.near

    def gather(self, size: float) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes."""
        return self._ring(size, 1)

    scatter = gather

    def reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes."""
        ring = self._ring(size, 2)
        return min(ring, self._tree(size)) if self.crosses else ring

    def exchange(self, size: float, leaving: float = 1.0) -> float:
        """Seconds of an all-to-all in which each rank has `size` bytes for all of them, evenly.

        leaving: share of what is for other domains that has to go there (the rest is copied there).
        """
        if self.ranks == 1:
            return 0.0
        near = size * (self.inside - 1) / self.ranks / self.near.rate
        far = leaving * size * (self.ranks - self.inside) / self.ranks / self.far.rate
        if leaving < 1:  # each copy still goes from where it arrives to its rank
            near = size * (self.inside - 1) / self.inside / self.near.rate
        link = self.link
        return link.start + link.latency + max(near, far)

    def _ring(self, size: float, times: int) -> float:
        if self.ranks == 1:
            return 0.0
        hops = times * (1 if self.near.multicast else self.inside - 1)
        near = times * (self.inside - 1) / self.inside * size / self.near.rate
        if not self.crosses:
            return self.near.start + min(
                hops * self.near.latency + near / SMALL_RATE,
                hops * (self.near.latency + LARGE_STEP) + near,
            )
        far = (
            times
            * (self.domains - 1)
            / self.domains
            * size
            / self.inside
            / (SHARED * self.far.rate)
        )
        trips = times * (self.domains - 1)
        late = trips * self.far.latency + hops * self.near.latency
        return self.far.start + min(
            late + max(near, far) / SMALL_RATE, late + (trips + hops) * LARGE_STEP + max(near, far)
        )

    def _tree(self, size: float) -> float:
        inside, between = self.near, self.far
        depth = 2 * math.ceil(math.log2(self.domains))
        near = 2 * (self.inside - 1) / self.inside * size / inside.rate
        far = 2 * size / self.inside / (SHARED * between.rate)
        late = depth * between.latency + 2 * (self.inside - 1) * inside.latency
        return between.start + late + max(near, far)


def group(cluster: Cluster, layout: Layout, axes: Iterable[str]) -> Group:
    """The ranks that differ in `axes` (of `Layout.order`) alone."""
    wanted = set(axes)
    inside = domains = 1
    room = cluster.domain  # ranks of what is further out that still are in this domain
    for axis in reversed(layout.order):
        size = getattr(layout, axis)
        near = _divisor(size, room)
        if axis in wanted:
            inside *= near
            domains *= size // near
        room = room // near if near == size else 1
    return Group(inside, domains, cluster.inside, cluster.between)


def expert_groups(cluster: Cluster, layout: Layout) -> tuple[Group, Group]:
    """Ranks that exchange tokens, neighbours among dp_shard x cp x tp; and those with equal experts."""
    inside, domains = cluster.spread(layout.ep, 1)
    same = layout.dp_shard * layout.cp * layout.tp // layout.ep
    near, far = cluster.spread(same, layout.ep)
    links = cluster.inside, cluster.between
    return Group(inside, domains, *links), Group(near, far, *links)


def stage_link(cluster: Cluster, layout: Layout) -> Link:
    """What joins a stage and the next, the slower one where both kinds occur."""
    return group(cluster, layout, ("pp",)).link


def send(link: Link, size: float) -> float:
    """Seconds of one message."""
    return link.start + link.latency + size / link.rate


def slowed(hidden: float) -> float:
    """Seconds that computation takes longer for `hidden` seconds of traffic beside it."""
    return hidden * CARRYING / (1 - CARRYING)


def _divisor(size: int, room: int) -> int:
    """The most of `size` ranks that lie in `room`, the same number in every domain."""
    near = max(1, min(size, room))
    while size % near:
        near -= 1
    return near
