"""A measured machine as it serves: products over packed weights, by how many rows they have.

A processor has no single peak: a product of one row is bound by memory, of few rows by what is
unpacked for them, of many by arithmetic. `fivefold bench device` times all of these, and the curve
is read off what it found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.profile import AttentionTime, Gemm, Profile, own_profile, read_profile

Curve = tuple[tuple[float, float], ...]
"""(x, y) in order of x."""


@dataclass(frozen=True)
class MeasuredDevice(Device):
    """A device whose products were measured.

    products: by format, for the logarithm of a matrix' elements the curve of FLOP/s over rows;
    streams: over the same logarithm, bytes per second that a product of one row reads;
    reading: bytes per second of keys and values in decode; scoring: FLOP/s of a prompt's attention.
    """

    products: Mapping[str, tuple[tuple[float, Curve], ...]] = field(default_factory=dict)
    streams: Curve = ()
    reading: float = 0.0
    scoring: float = 0.0

    def rate(self, form: str, rows: float, elements: float) -> float:
        """FLOP/s of a product of so many rows with a matrix of so many elements.

        Between measured rows the time of a row's share lies on a straight line, between measured
        matrices the rate does, over the logarithm of their elements.
        """
        here = tuple((size, _along(curve, rows)) for size, curve in self.products[form])
        return _between(here, math.log(max(1.0, elements)))

    def streaming(self, elements: float) -> float:
        """Bytes per second that are read of a matrix of so many elements."""
        return _between(self.streams, math.log(max(1.0, elements)))


def _between(points: Curve, x: float) -> float:
    """On straight lines between points; beyond them the outermost."""
    if x <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if x <= high:
            return first + (x - low) / (high - low) * (last - first)
    return points[-1][1]


def _along(curve: Curve, rows: float) -> float:
    """A rate at so many rows: on straight lines of the time that all rows take."""
    rows = min(max(rows, curve[0][0]), curve[-1][0])
    return rows / _between(tuple((each, each / rate) for each, rate in curve), rows)


def as_measured(cluster: Cluster) -> Cluster:
    """The same cluster, with the curves of this machine where it is a measured processor."""
    path = own_profile("cpu")
    if not path.exists():
        return cluster
    profile = read_profile(path)
    if cluster.device.name != profile.name or profile.device_type != "cpu":
        return cluster
    return with_curves(cluster, profile)


def with_curves(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster that was made of a profile, its device with the profile's curves."""
    return replace(cluster, device=serving_device(cluster.device, profile))


def serving_device(device: Device, profile: Profile) -> MeasuredDevice | Device:
    """The device with curves; as it was, where nothing of the kind was measured."""
    packed = [each for each in profile.gemm if each.kind == "inference"]
    if not packed:
        return device
    forms = sorted({each.dtype for each in packed})
    curves = {form: curves_of([g for g in packed if g.dtype == form]) for form in forms}
    streams = _streams(packed, profile, device)
    plain = {each.name: getattr(device, each.name) for each in fields(Device)}
    peak = {
        form: max(rate for _, found in of_form for _, rate in found)
        for form, of_form in curves.items()
    }
    bandwidth = max(rate for _, rate in streams)
    return MeasuredDevice(
        **(plain | {"peak": peak, "bandwidth": bandwidth}),
        products=curves,
        streams=streams,
        reading=_reading(profile.attention, bandwidth),
        scoring=max((a.rate for a in profile.attention if a.kind == "forward"), default=0.0),
    )


def _streams(packed: list[Gemm], profile: Profile, device: Device) -> Curve:
    """What products of one row read: they are measured over copies that no cache holds, as a
    model's weights are not held. Plain reads stand in where there are none.
    """
    sizes: dict[int, list[float]] = {}
    for g in packed:
        if g.m == 1:
            moved = g.k * g.n * (4.0 if g.dtype == "fp32" else 2.0)
            sizes.setdefault(g.k * g.n, []).append(moved / g.seconds)
    if sizes:
        return tuple((math.log(n), sum(rates) / len(rates)) for n, rates in sorted(sizes.items()))
    reads = [t.bytes / t.seconds for t in profile.transfers if t.what == "read"]
    return ((0.0, max(reads, default=device.bandwidth)),)


def curves_of(products: list[Gemm]) -> tuple[tuple[float, Curve], ...]:
    """A curve for each size of matrix; those of the same size together.

    Products of one row are bound by memory, which is counted apart: a few rows at a time are
    multiplied as fast as the fewest that were measured beyond one.
    """
    sizes: dict[int, dict[int, list[Gemm]]] = {}
    several = [each for each in products if each.m > 1] or products
    for each in several:
        sizes.setdefault(each.k * each.n, {}).setdefault(each.m, []).append(each)
    return tuple(
        (
            math.log(elements),
            tuple(
                (float(m), sum(g.flops for g in found) / sum(g.seconds for g in found))
                for m, found in sorted(rows.items())
            ),
        )
        for elements, rows in sorted(sizes.items())
    )


def _reading(times: tuple[AttentionTime, ...], most: float) -> float:
    """Of decode over caches: the median rate, at most that of memory."""
    rates = sorted(
        2 * a.batch * a.sequence * a.kv_heads * a.head_dim * (4 if a.dtype == "fp32" else 2)
        / a.seconds
        for a in times
        if a.kind == "decode"
    )  # fmt: skip
    return min(most, rates[len(rates) // 2]) if rates else most
