"""What context ranks wait for: keys and values that travel, beside attention with those that are here."""

from __future__ import annotations

from dataclasses import replace

from fivefold.plan.communication import Group, send, slowed
from fivefold.plan.memory.place import Place
from fivefold.plan.time.cost import Cost


def context(place: Place, whole: Group, forward: float, backward: float) -> tuple[Cost, Cost]:
    """Exposed and hidden seconds of a layer, forward and backward. `forward`, `backward`: attention's."""
    if place.cp == 1:
        return Cost(), Cost()
    config = place.shape.config
    ways = place.cp // place.ulysses
    dims = config.head_dim + config.value_dim
    passed = place.inside * place.kv_heads * dims * float(place.element)
    swapped = _swapped(place, whole, dims)
    if ways == 1:
        return Cost(context=swapped), Cost(context=swapped)
    if place.ring == "gather":
        gather = whole.gather(passed * ways)
        return Cost(context=gather + swapped), Cost(context=2 * gather + swapped)
    return (
        _hops(ways, send(whole.link, passed), forward / ways) + Cost(context=swapped),
        _hops(ways, send(whole.link, 2 * passed), backward / ways) + Cost(context=swapped),
    )


def _hops(ways: int, hop: float, beside: float) -> Cost:
    """`ways` - 1 hops, each beside attention with one part of the keys."""
    hidden = min(hop, beside)
    return Cost(context=hop - hidden + slowed(hidden), hidden_context=hidden) * (ways - 1)


def _swapped(place: Place, whole: Group, dims: int) -> float:
    """Ulysses (Jacobs et al. 2023): heads for parts of the sequence before attention, and back."""
    if place.ulysses == 1:
        return 0.0
    inside = min(place.ulysses, whole.inside)
    ranks = replace(whole, inside=inside, domains=place.ulysses // inside)
    size = place.inside * (place.heads + place.kv_heads) * dims * float(place.element)
    return 2 * ranks.exchange(size / 2)
