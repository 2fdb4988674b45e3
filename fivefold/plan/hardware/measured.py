"""A measured profile as a device and a cluster that a plan can be made for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.catalogue import DEVICES
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


def this_machine(name: str, nodes: int | None, per_node: int | None) -> Cluster:
    """`this`, `this:cpu` or `this:cuda`: as measured last; or `nodes` x `per_node` of its devices.

    The ranks of a processor share its cores, its memory and the way there.
    """
    kind = name.partition(":")[2]
    if kind not in ("", "cpu", "cuda"):
        raise PlanError(f"there is no cluster {name!r}", "use this, this:cpu or this:cuda")
    kinds = [kind] if kind else ["cuda", "cpu"]
    there = [path for path in map(own_profile, kinds) if path.exists()]
    if not there:
        raise PlanError("this machine has not been measured", MEASURE)
    profile = read_profile(there[0])
    if nodes is None:
        return cluster_of(profile)
    if per_node is None:
        nodes, per_node = 1, nodes
    ranks = per_node if profile.device_type == "cpu" else 1
    found = cluster_of(profile, ranks)
    return replace(
        found, name=f"{nodes}x{per_node}x{name}", nodes=nodes, per_node=per_node, domain=per_node
    )


def device_of(profile: Profile, ranks: int = 1) -> Device:
    """What one of `ranks` that share the device has of it.

    Of a device in the catalogue the data sheet's peaks stay, and what products reach is measured;
    of others the best product measured is the peak.
    """
    training = [each for each in profile.gemm if each.kind == "training"] or list(profile.gemm)
    best = {form: max(g.rate for g in training if g.dtype == form) for form in _formats(training)}
    known = DEVICES.get(profile.catalogue or "")
    peak = dict(known.peak) if known is not None else best
    form = max(best, key=lambda each: best[each])
    read = _rate(profile, "read")
    if not read:
        raise PlanError(f"the profile of {profile.name} has no memory bandwidth", MEASURE)
    bandwidth = known.bandwidth if known is not None else read
    source = (
        f"`fivefold bench device` of {profile.date}, torch {profile.versions.get('torch', '?')}"
    )
    slower = profile.corrections.get("step", 1.0)  # than what the products alone would take
    return Device(
        name=profile.name,
        peak={each: rate / ranks for each, rate in peak.items()},
        memory=profile.memory / ranks,
        bandwidth=bandwidth / ranks,
        efficiency=Efficiency(
            products=min(1.0, best[form] / peak[form]) / slower,
            small=half_speed(
                [g for g in training if g.dtype == form], best[form], read, profile.launch
            )
            / ranks,
            bandwidth=min(1.0, (_rate(profile, "copy") or read) / bandwidth) / slower,
            attention=_attention_share(profile, peak) / slower,
            launch=profile.launch * slower,
            source=f"measured {profile.date}",
        ),
        watts=known.watts if known is not None else 0.0,
        price=known.price if known is not None else None,
        spot_price=known.spot_price if known is not None else None,
        source=source,
        notes={"note": profile.note} if profile.note else {},
    )


def _formats(products: Iterable[Gemm]) -> list[str]:
    return sorted({each.dtype for each in products})


def _rate(profile: Profile, what: str) -> float:
    """Bytes per second of the best `read` or `copy`; 0 where there is none."""
    return max((t.bytes / t.seconds for t in profile.transfers if t.what == what), default=0.0)


def _attention_share(profile: Profile, peak: Mapping[str, float]) -> float:
    """Share of the peak that attention with its backward reaches, or forward alone."""
    for kind in ("training", "forward"):
        said = [
            a.rate / peak[a.dtype] for a in profile.attention if a.kind == kind and a.dtype in peak
        ]
        if said:
            return min(1.0, max(said))
    return 0.5


def half_speed(
    products: Iterable[Gemm], peak: float, bandwidth: float = float("inf"), launch: float = 0.0
) -> float:
    """FLOP that a product loses: the median of what each says that memory does not bind.

    A product of f FLOP takes launch + (f + s) / peak.
    """
    said = [
        max(0.0, (g.seconds - launch) * peak - g.flops)
        for g in products
        if g.flops / peak >= moved(g) / bandwidth
    ]
    return statistics.median(said) if said else 0.0


def moved(product: Gemm) -> float:
    """Bytes of a product's three operands."""
    elements = product.m * product.k + product.k * product.n + product.m * product.n
    return elements * (4.0 if product.dtype == "fp32" else 2.0)


def cluster_of(profile: Profile, ranks: int = 1) -> Cluster:
    """One host of the devices that were measured, with its links as far as they were."""
    device = device_of(profile, ranks)
    server = SERVERS.get(profile.catalogue or "")
    usual = server.inside if server else _through_memory(device.bandwidth)
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


def _through_memory(bandwidth: float) -> Link:
    """Between processes of one host that nobody measured: in and out of memory, twice."""
    return Link(
        name="host memory", bandwidth=bandwidth, latency=5e-5, efficiency=0.25, source="assumed"
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
    return _link_of("measured collectives", points, source)


def transfer_link(transfers: Iterable[Transfer], source: str) -> Link | None:
    """The link that explains copies between host and device."""
    return _link_of("host to device", [(1.0, float(t.bytes), t.seconds) for t in transfers], source)


def _link_of(name: str, points: list[tuple[float, float, float]], source: str) -> Link | None:
    found = fit(points)
    if found is None:
        return None
    return Link(name=name, bandwidth=found[1], latency=found[0], efficiency=1.0, source=source)


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
