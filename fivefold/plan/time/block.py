"""Seconds of one layer for one micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core.layout import Layout
from fivefold.model.config import MoEConfig
from fivefold.plan.communication import Group, expert_groups, group, slowed
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.memory.place import Place
from fivefold.plan.time.attention import core
from fivefold.plan.time.cost import Cost
from fivefold.plan.time.rates import Rates
from fivefold.plan.time.ring import context
from fivefold.plan.time.work import inner_bytes, outer_bytes, products, rows

# Operators that the host starts for a layer beside attention's core: products, norms, sums, views.
FORWARD, BACKWARD, EXPERTS = 18, 36, 20
OUTER, INNER = 4, 2  # elementwise kernels forward


@dataclass(frozen=True)
class Passes:
    """Forward; backward for the input and for weights; what backward computes again before."""

    forward: Cost
    input: Cost
    weight: Cost
    again: Cost

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward, self.input + other.input, self.weight + other.weight,
            self.again + other.again,
        )  # fmt: skip

    def __mul__(self, times: float) -> Passes:
        return Passes(
            self.forward * times, self.input * times, self.weight * times, self.again * times
        )


NOTHING = Passes(Cost(), Cost(), Cost(), Cost())


@dataclass(frozen=True)
class Neighbours:
    """The groups inside which a layer communicates."""

    tensor: Group
    context: Group
    experts: Group

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> Neighbours:
        """Of a layout's ranks on a cluster."""
        return cls(
            group(cluster, layout, ("tp",)),
            group(cluster, layout, ("cp",)),
            expert_groups(cluster, layout)[0],
        )


def block(place: Place, rates: Rates, near: Neighbours, window: int | None, sparse: bool) -> Passes:
    """Of a layer with `window` whose feed-forward is experts if `sparse`."""
    forward, input_, weight = _products(place, rates, sparse)
    attended, returned, kernels = core(place, rates, window)
    cast, cast_back = _casts(place, rates, sparse)
    ahead = _elementwise(place, rates, sparse, False) + cast
    back = _elementwise(place, rates, sparse, True) + cast_back
    along, against = context(place, near.context, attended, returned)
    routed, routed_back = _experts(
        place, near.experts, sparse, forward + attended + ahead, input_ + weight + returned + back
    )
    tensor = exchange(place, near.tensor, _modules(place, sparse))
    returning = tensor + _again_gathered(place, near.tensor, _modules(place, sparse))
    late = min(place.software.overlap_tensor * returning, weight)
    more = EXPERTS if sparse else 0
    down = Cost(
        products=forward, attention=attended, elementwise=ahead, tensor=tensor,
        operators=FORWARD + kernels + more,
    )  # fmt: skip
    up = Cost(
        products=input_, attention=returned, elementwise=back, tensor=returning - late + slowed(late),
        hidden_tensor=late, operators=BACKWARD + 2 * kernels + more,
    )  # fmt: skip
    whole = down + along + routed
    return Passes(
        whole,
        up + against + routed_back,
        Cost(products=weight, elementwise=_accumulated(place, rates, sparse), operators=4),
        _again(place, rates, whole, tensor),
    )


def exchange(place: Place, tensor: Group, modules: float) -> float:
    """Seconds in which hidden states enter and leave divided modules, forward (backward is alike)."""
    if place.tp == 1:
        return 0.0
    if place.tensor > 1:
        return modules * (tensor.gather(place.gathered) + tensor.scatter(place.gathered))
    return modules * tensor.reduce(place.gathered)


def _again_gathered(place: Place, tensor: Group, modules: int) -> float:
    """Inputs of divided modules that backward gathers once more where they were not kept."""
    if place.tensor == 1 or place.software.keeps_gathered:
        return 0.0
    return modules * tensor.gather(place.gathered)


def _modules(place: Place, sparse: bool) -> int:
    """Divided modules of a layer: attention, and the feed-forward that all tokens pass."""
    moe = place.shape.config.moe
    if sparse and moe is not None and not moe.shared_size:
        return 1
    return 2


def _products(place: Place, rates: Rates, sparse: bool) -> tuple[float, float, float]:
    """Seconds of products forward, backward for inputs, backward for weights."""
    forward = weight = 0.0
    element, kept = place.element, place.software.gradient_bytes
    for each in products(place.shape, sparse, place.tp, place.ep):
        n = rows(place, each)
        operands = element * n * (each.inputs + each.outputs)
        flops = each.flops(n)
        forward += rates.product(flops, operands + element * each.elements, each.aligned)
        weight += rates.product(flops, operands + 2 * kept * each.elements, each.aligned)
    return forward, forward, weight


def _accumulated(place: Place, rates: Rates, sparse: bool) -> float:
    """Gradients of a micro-batch are added to the sum, where the product does not do that itself."""
    found = products(place.shape, sparse, place.tp, place.ep)
    size = sum(each.elements for each in found) * place.software.accumulate
    return rates.pass_over(size, len(found)) if size else 0.0


def _casts(place: Place, rates: Rates, sparse: bool) -> tuple[float, float]:
    """Operands of products in 8 bits: read in 16, written as they are and transposed, in 8 each.

    Inputs forward, gradients of outputs backward; weights are cast once a step, which is nothing.
    """
    if not rates.narrow:
        return 0.0, 0.0
    taken = given = 0.0
    found = products(place.shape, sparse, place.tp, place.ep)
    for each in found:
        taken += 2 * place.element * rows(place, each) * each.inputs
        given += 2 * place.element * rows(place, each) * each.outputs
    return rates.pass_over(taken, len(found)), rates.pass_over(given, len(found))


def _elementwise(place: Place, rates: Rates, sparse: bool, backward: bool) -> float:
    times = 2 if backward else 1
    return rates.pass_over(outer_bytes(place, backward), OUTER * times) + rates.pass_over(
        inner_bytes(place, sparse, backward), INNER * times
    )


def _experts(
    place: Place, group: Group, sparse: bool, ahead: float, back: float
) -> tuple[Cost, Cost]:
    """Rows to their experts and back, forward and once more backward, beside computation of `ahead` and
    `back` seconds: a schedule with both under way hides one behind the other's.
    """
    moe, software = place.shape.config.moe, place.software
    if not sparse or moe is None or place.ep == 1:
        return Cost(), Cost()
    sent = place.inside / place.tp * moe.top_k * place.shape.config.hidden_size
    sent *= software.imbalance
    once = _leaving(moe, group.domains) if software.dispatch_once else 1.0
    there = group.exchange(sent * (software.dispatch_bytes or place.element), once)
    again = group.exchange(sent * place.element, once)
    return _beside(there + again, software.overlap_experts, ahead), _beside(
        there + again, software.overlap_experts, back
    )


def _leaving(moe: MoEConfig, domains: int) -> float:
    """Domains that a token goes to over the experts that it goes to, if experts are chosen evenly."""
    met = domains * (1 - (1 - 1 / domains) ** moe.top_k)
    if moe.groups > 1:
        met = min(met, moe.top_groups)
    return met / moe.top_k


def _beside(seconds: float, share: float, computing: float) -> Cost:
    hidden = min(share * seconds, computing)
    return Cost(experts=seconds - hidden + slowed(hidden), hidden_experts=hidden)


def _again(place: Place, rates: Rates, forward: Cost, tensor: float) -> Cost:
    """What is computed a second time before backward."""
    if place.recompute == "none":
        return Cost()
    if place.recompute == "full":
        return forward
    if place.software.selective == "attention":
        return Cost(attention=forward.attention, operators=5)
    return Cost(elementwise=forward.elementwise, tensor=tensor, operators=FORWARD)
