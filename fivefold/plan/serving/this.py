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
"""(rows, FLOP/s) in order of rows."""


@dataclass(frozen=True)
class MeasuredDevice(Device):
    """`products`: by format, curves of a product's rate by the logarithm of a matrix' elements;
    `reading`: bytes per second of keys
    and values that decode reads; `scoring`: FLOP/s of attention of a prompt.
    """

    products: Mapping[str, tuple[tuple[float, Curve], ...]] = field(default_factory=dict)
    reading: float = 0.0
    scoring: float = 0.0

    def rate(self, form: str, rows: float, elements: float) -> float:
        """FLOP/s of a product of so many rows with a matrix of so many elements.

        Between measured rows the time of a row's share lies on a straight line, between measured
        matrices the rate does, over the logarithm of their elements.
        """
        curves = self.products[form]
        size = math.log(max(1.0, elements))
        low, slow = curves[0]
        for high, fast in curves:
            if size <= high:
                break
            low, slow = high, fast
        else:
            return _along(slow, rows)
        if high == low or size <= low:
            return _along(fast, rows)
        share = (size - low) / (high - low)
        return (1 - share) * _along(slow, rows) + share * _along(fast, rows)


def _along(curve: Curve, rows: float) -> float:
    """A curve's rate at so many rows."""
    if rows <= curve[0][0]:
        return curve[0][1]
    for (low, slow), (high, fast) in pairwise(curve):
        if rows <= high:
            share = (rows - low) / (high - low)
            return rows / ((1 - share) * low / slow + share * high / fast)
    return curve[-1][1]


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
    bandwidth = _streaming(packed, profile, device)
    plain = {each.name: getattr(device, each.name) for each in fields(Device)}
    peak = {
        form: max(rate for _, found in of_form for _, rate in found)
        for form, of_form in curves.items()
    }
    return MeasuredDevice(
        **(plain | {"peak": peak, "bandwidth": bandwidth}),
        products=curves,
        reading=_reading(profile.attention, bandwidth),
        scoring=max((a.rate for a in profile.attention if a.kind == "forward"), default=0.0),
    )


def weight_bytes(product: Gemm) -> float:
    """Of the matrix."""
    return product.k * product.n * (4.0 if product.dtype == "fp32" else 2.0)


def _streaming(packed: list[Gemm], profile: Profile, device: Device) -> float:
    """Bytes per second that products of one row read: they are measured over copies that no cache
    holds, as a model's weights are not held. Plain reads stand in where there are none.
    """
    single = [g for g in packed if g.m == 1]
    if single:
        return max(weight_bytes(g) / g.seconds for g in single)
    reads = [t.bytes / t.seconds for t in profile.transfers if t.what == "read"]
    return max(reads, default=device.bandwidth)


def curves_of(products: list[Gemm]) -> tuple[tuple[float, Curve], ...]:
    """A curve for each size of matrix; those of the same size together."""
    sizes: dict[int, dict[int, list[Gemm]]] = {}
    for each in products:
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
