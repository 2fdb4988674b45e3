"""New weights for all ranks: rank 0 has them whole, and sends each its boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from fivefold.axes.part import Slice
from fivefold.engines.serve.paged.weights import Shapes, check_state
from fivefold.engines.serve.parallel.messages import Done, NewWeights, Order, Repack, Sleep, WakeUp
from fivefold.engines.serve.parallel.processes import RankProcesses
from fivefold.engines.serve.parallel.rank import Rank

Together = Callable[[], AbstractContextManager[RankProcesses]]


class RankWeights:
    """As ServedWeights, for the weights and cache of all ranks. What is refused changes nothing.

    `rank`: this one. `slices`: of all ranks, from 0 on.
    """

    def __init__(
        self,
        together: Together,
        rank: Rank,
        shapes: Shapes,
        slices: Sequence[Mapping[str, Slice]],
    ) -> None:
        self._together = together
        self._rank, self._own = rank, rank.weights
        self._shapes = shapes
        self._slices = slices

    @property
    def sleeping(self) -> int:
        """See ServedWeights; all ranks sleep alike."""
        return self._own.sleeping

    def update(self, state: Mapping[str, Tensor], partial: bool = False) -> None:
        """Copy new weights into those of all ranks. Weights travel one at a time."""
        check_state(self._shapes, state, partial)
        self._own.update(self._boxes(0, state), partial=True)
        with self._together() as others:
            for name, tensor in state.items():
                for rank in range(1, len(self._slices)):
                    if name in self._slices[rank]:
                        others.send(rank, NewWeights(self._boxes(rank, {name: tensor})))

    def sleep(self, level: int) -> None:
        """Give memory back on all ranks."""
        self._own.sleep(level)
        self._tell(Sleep(level))

    def wake_up(self, state: Mapping[str, Tensor] | None) -> None:
        """Take it again, with new weights where they are given."""
        if state is not None:
            check_state(self._shapes, state, partial=False)
        self._own.wake_up(None if state is None else self._boxes(0, state))
        with self._together() as others:
            for rank in range(1, len(self._slices)):
                others.send(rank, WakeUp(None if state is None else self._boxes(rank, state)))
            others.receive_all(Done)

    def repack(self) -> None:
        """Bring what is packed beside the weights up to date with them."""
        self._rank.repack()
        self._tell(Repack())

    def _tell(self, order: Order) -> None:
        with self._together() as others:
            others.send_all(order)
            others.receive_all(Done)

    def _boxes(self, rank: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What of `state` the rank holds, in memory of its own: a view would be sent whole."""
        held = self._slices[rank]
        found = {
            name: held[name].cut(tensor.detach()) for name, tensor in state.items() if name in held
        }
        return found if rank == 0 else {name: box.cpu().clone() for name, box in found.items()}
