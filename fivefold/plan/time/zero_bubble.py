"""Schedules of Qi et al. 2023 (2401.10241) that training here has not: for holding times to their paper.

ZB-H2 keeps up to 2p - 1 micro-batches, twice what 1F1B keeps, so that nothing waits while the pipeline
fills. ZB-2p finds an order for given times within the memory of 2p micro-batches: here greedily, where the
paper has a heuristic with local search.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.schedule import Order, Schedule, straight
from fivefold.axes.pp.simulate import Costs, simulate
from fivefold.axes.pp.timeline import Timeline


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Handcrafted. Rank r starts 2(p-r) - 1 micro-batches before the first backward, and is 2r W late."""
    orders = []
    for rank in range(ranks):
        order = Order({rank: range(microbatches)})
        first = min(2 * (ranks - rank) - 1, microbatches)
        for _ in range(first):
            order.forward(rank)
        for _ in range(microbatches):
            order.for_input(rank)
            if order.forwards(rank) < microbatches:
                order.forward(rank)
            if order.owed > 2 * rank:
                order.for_weights()
        orders.append((*order.actions, *order.take_owed()))
    return Schedule("zb-h2", ranks, ranks, microbatches, straight(ranks), tuple(orders))


def zb_2p(costs: Sequence[Costs], microbatches: int, aside: float = 1.0) -> Schedule:
    """Greedy: a rank does the input's backward as soon as it can, else a forward while it keeps no more
    than 2p micro-batches, and W where it would wait, or where it keeps as many as it may. `aside`:
    what is kept for W alone, as a share of what is kept for the whole backward.

    Of several degrees of patience the best: how much of a forward a rank waits, before its first
    backward, for one that is on its way; and how much of a W a gap must hold for a W to go first.
    """
    found: list[tuple[float, int, Schedule]] = []
    for forward in (0.5, 1.0):
        for weight in (0.1, 0.3):
            schedule = _greedy(costs, microbatches, aside, (forward, weight))
            found.append((window(simulate(schedule, costs)), len(found), schedule))
    return min(found)[2]


def window(timeline: Timeline) -> float:
    """The longest time from a rank's own first action to its last: what a step costs where the
    optimizer need not wait for all (the paper's measure).
    """
    spans = (timeline.of(rank) for rank in range(timeline.schedule.ranks))
    return max(each[-1].end - each[0].start for each in spans)


def _greedy(
    costs: Sequence[Costs], microbatches: int, aside: float, patience: tuple[float, float]
) -> Schedule:
    ranks = len(costs)
    state = _Greedy(costs, microbatches, 2 * ranks, aside, patience)
    while state.step():
        pass
    return Schedule(
        "zb-2p", ranks, ranks, microbatches, straight(ranks), tuple(map(tuple, state.orders))
    )


class _Greedy:
    def __init__(
        self,
        costs: Sequence[Costs],
        microbatches: int,
        limit: int,
        aside: float,
        patience: tuple[float, float],
    ) -> None:
        self.costs, self.count, self.limit, self.aside = costs, microbatches, limit, aside
        self.patience = patience
        self.ranks = len(costs)
        self.orders: list[list[Action]] = [[] for _ in costs]
        self.free = [0.0] * self.ranks
        self.done = [dict.fromkeys("FIW", 0) for _ in costs]
        self.hidden: list[list[float]] = [[0.0] * microbatches, *([] for _ in costs[1:])]
        self.returned: list[list[float]] = [[] for _ in costs]
        self.next_of = [self._next(rank) for rank in range(self.ranks)]

    def step(self) -> bool:
        """The rank that can begin something first begins it; False when all is done."""
        choices = [(*found, r) for r, found in enumerate(self.next_of) if found is not None]
        if not choices:
            return False
        start, _, kind, rank = min(choices)
        self._do(rank, kind, start)
        for changed in range(max(0, rank - 1), min(self.ranks, rank + 2)):
            self.next_of[changed] = self._next(changed)
        return True

    def _next(self, rank: int) -> tuple[float, int, str] | None:
        """(start, preference, kind) of what this rank would do next."""
        done, free = self.done[rank], self.free[rank]
        options = []
        coming = float("inf")
        if done["I"] < len(self.returned[rank]):
            coming = self.returned[rank][done["I"]]
            options.append((max(free, coming), 0, "I"))
        kept = done["F"] - done["I"] + self.aside * (done["I"] - done["W"])
        full = kept + 1 > self.limit
        if done["F"] < min(self.count, len(self.hidden[rank])) and not full:
            start = max(free, self.hidden[rank][done["F"]])
            patience = 0.0 if done["I"] else self.patience[0] * self.costs[rank].forward
            if not coming <= start + patience:
                options.append((start, 1, "F"))
        if done["W"] < done["I"]:
            best = min(options, default=None)
            cost = self.costs[rank].weight
            if best is None or full or best[0] >= free + cost * self.patience[1]:
                options.append((free, 2, "W"))
        return min(options, default=None)

    def _do(self, rank: int, kind: str, start: float) -> None:
        cost, number = self.costs[rank], self.done[rank][kind]
        end = start + {"F": cost.forward, "I": cost.input, "W": cost.weight}[kind]
        self.orders[rank].append(Action(kind, rank, number))  # type: ignore[arg-type]
        self.done[rank][kind] += 1
        self.free[rank] = end
        if kind == "F":
            if rank + 1 < self.ranks:
                self.hidden[rank + 1].append(end + cost.send)
            else:
                self.returned[rank].append(end)
        elif kind == "I" and rank:
            self.returned[rank - 1].append(end + cost.send)
