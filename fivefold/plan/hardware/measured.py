"""A measured profile as a device and a cluster that a plan can be made for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.efficiency import Efficiency
from fivefold.plan.hardware.link import Link
from fivefold.plan.hardware.profile import (
    CollectiveTime,
    Gemm,
    Profile,
    Transfer,
    own_profile,
    read_profile,
)
from fivefold.plan.hardware.servers import SERVERS

MEASURE = "measure it with `fivefold bench device`"
# Bytes that leave a rank over bytes of the whole tensor, and messages one after the other, in a ring.
RING = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "send": 1.0}


def this_machine(name: str, nodes: int | None, per_node: int | None) -> Cluster:
    """`this`, `this:cpu` or `this:cuda`: as measured last; `nodes` x `per_node` such devices."""
    kind = name.partition(":")[2]
    if kind not in ("", "cpu", "cuda"):
        raise PlanError(f"there is no cluster {name!r}", "use this, this:cpu or this:cuda")
    kinds = [kind] if kind else ["cuda", "cpu"]
    there = [path for path in map(own_profile, kinds) if path.exists()]
    if not there:
        raise PlanError("this machine has not been measured", MEASURE)
    whole = cluster_of(read_profile(there[0]))
    if nodes is None:
        return whole
    if per_node is None:
        nodes, per_node = 1, nodes
    return replace(
        whole, name=f"{nodes}x{per_node}x{name}", nodes=nodes, per_node=per_node, domain=per_node
    )


def device_of(profile: Profile) -> Device:
    """The device: its peak is the best product measured, so efficiencies are shares of that."""
    formats = sorted({each.dtype for each in profile.gemm})
    peak = {form: max(g.rate for g in profile.gemm if g.dtype == form) for form in formats}
    best = max(formats, key=lambda form: peak[form])
    read = max((t.bytes / t.seconds for t in profile.transfers if t.what == "read"), default=0.0)
    copy = max((t.bytes / t.seconds for t in profile.transfers if t.what == "copy"), default=read)
    if not read:
        raise PlanError(f"the profile of {profile.name} has no memory bandwidth", MEASURE)
    attention = [a.rate / peak[a.dtype] for a in profile.attention if a.dtype in peak]
    return Device(
        name=profile.name,
        peak=peak,
        memory=profile.memory,
        bandwidth=read,
        efficiency=Efficiency(
            products=1.0,
            small=half_speed([g for g in profile.gemm if g.dtype == best], peak[best]),
            bandwidth=min(1.0, copy / read),
            attention=max(attention, default=0.5),
            launch=profile.launch,
            source=f"measured {profile.date}",
        ),
        source=f"`fivefold bench device` of {profile.date}, torch {profile.versions.get('torch', '?')}",
        notes={"note": profile.note} if profile.note else {},
    )


def half_speed(products: Iterable[Gemm], peak: float) -> float:
    """FLOP at which a product reaches half of `peak`: the median of what each product says.

    A product of f FLOP takes (f + s) / peak where the curve is f / (f + s).
    """
    said = sorted(max(0.0, g.seconds * peak - g.flops) for g in products)
    return said[len(said) // 2] if said else 0.0


def cluster_of(profile: Profile) -> Cluster:
    """One host of the devices that were measured, with its links as far as they were."""
    device = device_of(profile)
    server = SERVERS.get(profile.catalogue or "")
    usual = server.inside if server else Link("host memory", device.bandwidth / 4, 5e-5, 1.0, "assumed")
    inside = collective_link(profile.collectives, f"{profile.name}, {profile.date}") or usual
    host = transfer_link(
        [t for t in profile.transfers if t.what == "host to device"], f"measured {profile.date}"
    )
    return Cluster(
        name=profile.name,
        device=device,
        nodes=1,
        per_node=profile.devices,
        domain=profile.devices,
        inside=inside,
        between=server.between if server else inside,
        host=host or (server.host if server else usual),
    )


def collective_link(times: Iterable[CollectiveTime], source: str) -> Link | None:
    """Bandwidth and latency of the ring that explains the measured all-reduces best.

    An all-reduce of b bytes over n ranks sends 2 (n-1)/n b bytes in 2 (n-1) messages.
    """
    points = [
        (2.0 * (t.ranks - 1), 2.0 * (t.ranks - 1) / t.ranks * t.bytes, t.seconds)
        for t in times
        if t.op == "all-reduce" and t.ranks > 1
    ]
    found = fit(points)
    return None if found is None else Link("measured", found[1], found[0], 1.0, source)


def transfer_link(transfers: Iterable[Transfer], source: str) -> Link | None:
    """The link that explains copies between host and device."""
    found = fit([(1.0, float(t.bytes), t.seconds) for t in transfers])
    return None if found is None else Link("host to device", found[1], found[0], 1.0, source)


def fit(points: list[tuple[float, float, float]]) -> tuple[float, float] | None:
    """(latency, bandwidth) of seconds = messages * latency + bytes / bandwidth.

    Least squares of relative errors, so that small messages count as much as large ones.
    """
    if not points:
        return None
    rows = [(m / s, b / s) for m, b, s in points if s > 0]
    mm, mb, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m1, b1 = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = mm * bb - mb * mb
    if len({b for _, b, _ in points}) < 2 or determinant <= 1e-12 * mm * bb:
        largest = max(points, key=lambda point: point[1])
        return 0.0, largest[1] / largest[2]
    latency = (m1 * bb - b1 * mb) / determinant
    inverse = (mm * b1 - mb * m1) / determinant
    if latency < 0 or inverse <= 0 or not math.isfinite(inverse):
        largest = max(points, key=lambda point: point[1])
        smallest = min(points, key=lambda point: point[1])
        return smallest[2] / smallest[0], largest[1] / largest[2]
    return latency, 1 / inverse
