"""Collectives, told from the operators that torch's dispatcher sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines its operators
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._pytree import tree_leaves

from fivefold.axes.mesh import DIMS, EXPERT, EXPERT_DATA, EXPERT_STATE, Mesh
from fivefold.engines.train.dry_run.account import Collective

_c10d, _functional = torch.ops.c10d, torch.ops._c10d_functional
# Operator: kind, and the argument whose bytes count (None: the result).
KINDS: dict[Any, tuple[str, int | None]] = {
    _c10d.allreduce_.default: ("all-reduce", 0),
    _c10d._allgather_base_.default: ("all-gather", 0),
    _c10d._reduce_scatter_base_.default: ("reduce-scatter", 1),
    _c10d.broadcast_.default: ("broadcast", 0),
    _c10d.alltoall_base_.default: ("all-to-all", 1),
    _c10d.send.default: ("send", 0),
    _c10d.recv_.default: ("recv", 0),
    _functional.all_reduce.default: ("all-reduce", 0),
    _functional.all_gather_into_tensor.default: ("all-gather", None),
    _functional.reduce_scatter_tensor.default: ("reduce-scatter", 0),
    _functional.all_to_all_single.default: ("all-to-all", 0),
}
SILENT = {_functional.wait_tensor.default, _functional._wrap_tensor_autograd.default}
NAMESPACES = ("c10d", "_c10d_functional")
EXPERT_NAMES = {EXPERT: "ep", EXPERT_STATE: "expert_shard", EXPERT_DATA: "expert_data"}


class Traffic:
    """Counts and bytes by kind and group. `name` says which axis a group's ranks differ in."""

    def __init__(self, name: Callable[[Sequence[int]], str]) -> None:
        self._name = name
        self._names: dict[str, tuple[str, int]] = {}
        self._seen: dict[tuple[str, str, int], list[int]] = {}

    def see(self, operator: Any, args: Sequence[Any], result: Any) -> None:
        """Take note of an operator, if it is a collective over more than one rank."""
        if operator in SILENT:
            return
        # A collective that is not known here must not go uncounted: get_process_group raises.
        axis, ranks = self._group(CollectiveOp.get_process_group(operator, args))
        if ranks == 1:
            return
        kind, where = KINDS.get(operator, (operator.name(), 0))
        entry = self._seen.setdefault((kind, axis, ranks), [0, 0])
        entry[0] += 1
        entry[1] += _bytes(result if where is None else args[where])

    def clear(self) -> None:
        """Start from nothing."""
        self._seen.clear()

    def collectives(self) -> tuple[Collective, ...]:
        """Of all seen since `clear`, the largest first."""
        found = [Collective(*key, *numbers) for key, numbers in self._seen.items()]
        return tuple(sorted(found, key=lambda c: (-c.bytes, c.kind, c.axis)))

    def _group(self, group: dist.ProcessGroup) -> tuple[str, int]:
        if group.group_name not in self._names:
            ranks = dist.get_process_group_ranks(group)
            self._names[group.group_name] = self._name(ranks), len(ranks)
        return self._names[group.group_name]


def axis_name(mesh: Mesh | None, ranks: Sequence[int]) -> str:
    """The axes in which a group's `ranks`, which ascend, differ; `world` for all of several axes.

    Groups of experts (`ep`, and those that hold the same ones) go by their own name, and where
    they are all ranks of some axes, by both.
    """
    if mesh is None or len(ranks) == 1:
        return "alone"
    places = [mesh.coordinates(ranks[0]), mesh.coordinates(ranks[-1])]
    dims = [dim for dim in DIMS if places[0][dim] != places[1][dim]]
    whole = math.prod(getattr(mesh.layout, dim) for dim in dims) == len(ranks)
    dense = "world" if len(dims) > 1 and len(ranks) == mesh.layout.world_size else "+".join(dims)
    expert = _expert_name(mesh, ranks)
    if expert is None:
        return dense
    return f"{dense}/{expert}" if whole else expert


def _expert_name(mesh: Mesh, ranks: Sequence[int]) -> str | None:
    if mesh.layout.ep == 1:
        return None
    for axes, name in EXPERT_NAMES.items():
        group = mesh.group(axes)
        if group is not None and dist.get_process_group_ranks(group) == list(ranks):
            return name
    return None


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))
