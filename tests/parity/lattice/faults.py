"""Known mistakes of parallel training, planted one at a time: each must show in the lattice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fivefold.axes import divided
from fivefold.axes.cp import axis as context
from fivefold.axes.cp.ring import RingAttention
from fivefold.axes.cp.split import ContextSplit
from fivefold.axes.dp import replicated
from fivefold.axes.ep import divide as experts
from fivefold.axes.part import Slice
from fivefold.axes.pp.runtime import PipelineRuntime
from fivefold.axes.tp import collectives
from fivefold.axes.tp.plan import share
from fivefold.model.side_loss import SideLoss

Planted = AbstractContextManager[Any]


@dataclass(frozen=True)
class Fault:
    """Where it is planted, and a layout and model on which it does harm."""

    plant: Callable[[], Planted]
    layout: str
    model: str


def partial_gradients_not_added() -> Planted:
    """Of norms on sequence shards, of key/value heads that ranks share, of a tied embedding."""
    return mock.patch.object(replicated, "add_parts", lambda gradients, sums: None)


def hidden_gradient_not_reduced() -> Planted:
    """Into a divided block: each rank keeps the gradient of its own heads."""
    real = collectives._reduce_scatter

    def own_shard(x: torch.Tensor, group: Any) -> torch.Tensor:
        ours = real(x, group)
        ranks = torch.distributed.get_world_size(group)
        return ours if not _in_backward() else x.chunk(ranks, 1)[torch.distributed.get_rank(group)]

    return mock.patch.object(collectives, "_reduce_scatter", own_shard)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def copies_counted_in_the_norm() -> Planted:
    """Every rank's squares count whole, also of parameters that others hold too."""
    return mock.patch.object(Slice, "copied", lambda self, copy, copies: self)


def heads_of_another_rank() -> Planted:
    """Keys and values of the neighbour's group of query heads."""

    def shifted(size: int, split: Any, config: Any, rank: int, ranks: int) -> tuple[int, int]:
        return share(size, split, config, (rank + (split.unit == "kv_head")) % ranks, ranks)

    return mock.patch("fivefold.axes.tp.divide.share", shifted)


def positions_off_by_one() -> Planted:
    """A context rank counts positions of its later chunk from one too early."""
    real = ContextSplit.split

    def split(self: ContextSplit, *rows: Any) -> Any:
        found = real(self, *rows)
        half = found.positions.shape[1] // 2
        found.positions[:, half:] -= 1
        return found

    return mock.patch.object(ContextSplit, "split", split)


def documents_leak() -> Planted:
    """Attention across the borders of packed documents."""
    real = context.ContextAxis.attention
    return mock.patch.object(
        context.ContextAxis,
        "attention",
        lambda self, documents, places: real(self, None, places, places.shape[0] * 2),
    )


def labels_leak() -> Planted:
    """The last token of a document learns the first of the next."""
    real = ContextSplit.split

    def split(self: ContextSplit, tokens: Any, labels: Any, positions: Any, documents: Any) -> Any:
        leaked = torch.where(labels == -100, tokens.roll(-1, 1), labels)
        return real(self, tokens, leaked, positions, documents)

    return mock.patch.object(ContextSplit, "split", split)


def own_keys_alone() -> Planted:
    """A ring that never turns."""
    real = RingAttention.__init__

    def init(self: Any, group: Any, sight: Any, runs: Any) -> None:
        real(self, group, sight, [runs[torch.distributed.get_rank(group)]] * len(runs))

    return mock.patch.object(RingAttention, "__init__", init)


def side_loss_times_the_world() -> Planted:
    """Each of two data ranks feeds in the auxiliary loss as if it had to stand for both."""

    def read(self: SideLoss) -> float:
        return 2 * self.__dict__["scale"]

    def write(self: SideLoss, value: float) -> None:
        self.__dict__["scale"] = value

    return mock.patch.object(SideLoss, "scale", property(read, write), create=True)


def load_of_a_part_of_the_sequence() -> Planted:
    """The auxiliary loss looks at this rank's tokens alone."""
    return mock.patch.object(experts, "sequence_sum", lambda group: lambda x: x)


def expert_gradients_over_all_data_ranks() -> Planted:
    """Experts are summed as if every data rank held the same ones."""
    return mock.patch.object(replicated, "expert_groups", replicated.dense_groups)


def tied_gradients_not_added() -> Planted:
    """The embedding learns as a table on the first stage and as a head on the last."""
    return mock.patch.object(divided, "_is_tied", lambda cut: False)


def micro_batches_scaled_twice() -> Planted:
    """The pipeline divides by the number of micro-batches what was divided by all targets."""
    real = PipelineRuntime.run
    return mock.patch.object(PipelineRuntime, "run", lambda self, scale: real(self, scale / 2))


FAULTS = {
    "partial_gradients_not_added": Fault(partial_gradients_not_added, "tp=2", "dense"),
    "shared_heads_not_added": Fault(
        partial_gradients_not_added, "tp=4,sequence_parallel=false", "tied"
    ),
    "hidden_gradient_not_reduced": Fault(hidden_gradient_not_reduced, "tp=2", "dense"),
    "copies_counted_in_the_norm": Fault(copies_counted_in_the_norm, "tp=2", "dense"),
    "heads_of_another_rank": Fault(heads_of_another_rank, "tp=2", "dense"),
    "positions_off_by_one": Fault(positions_off_by_one, "cp=2", "dense"),
    "documents_leak": Fault(documents_leak, "cp=2", "dense"),
    "labels_leak": Fault(labels_leak, "cp=2", "dense"),
    "own_keys_alone": Fault(own_keys_alone, "cp=2", "dense"),
    "side_loss_times_the_world": Fault(side_loss_times_the_world, "dp_replicate=2", "moe"),
    "load_of_a_part_of_the_sequence": Fault(load_of_a_part_of_the_sequence, "cp=2", "mla"),
    "expert_gradients_over_all_data_ranks": Fault(
        expert_gradients_over_all_data_ranks, "dp_shard=2,ep=2,zero=1", "moe"
    ),
    "tied_gradients_not_added": Fault(tied_gradients_not_added, "pp=2", "tied"),
    "micro_batches_scaled_twice": Fault(micro_batches_scaled_twice, "pp=2", "dense"),
}
