"""One real training step with everything that it holds and moves written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from fivefold.axes.mesh import DIMS, Mesh
from fivefold.axes.parallel import ParallelModel
from fivefold.engines.train.data.batch import Batch
from fivefold.engines.train.dry_run.account import Account, Memory
from fivefold.engines.train.dry_run.memory import MemoryLog
from fivefold.engines.train.dry_run.recorder import recording
from fivefold.engines.train.dry_run.traffic import Traffic, axis_name
from fivefold.engines.train.optimizer import MasterOptimizer
from fivefold.engines.train.step import TrainStep


class Built(NamedTuple):
    """What a step runs on."""

    model: ParallelModel
    optimizer: MasterOptimizer
    step: TrainStep


def measure(
    build: Callable[[], Built], batches: Sequence[Batch], mesh: Mesh | None, lr: float
) -> Account:
    """Build, take one step, and tell what this rank held and moved in it.

    The same on real ranks and in a fake world. The model is built under observation too, so that
    all its storages are known.
    """
    memory, traffic = MemoryLog(), Traffic(partial(axis_name, mesh))
    with recording(memory, traffic):
        built = build()
        gradients = _note_gradients(built.model, memory)
        traffic.clear()
        start = memory.now()
        built.step(batches, lr)
        # Counted while it all lives.
        held = _memory(built, memory, gradients, start)
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = dict.fromkeys(DIMS, 0) if mesh is None else mesh.coordinates(rank)
    return Account(rank, place, held, traffic.collectives())


def _note_gradients(model: ParallelModel, memory: MemoryLog) -> dict[int, int]:
    """Filled by `reduce`: the storages that gradients then lie in, and their bytes."""
    found: dict[int, int] = {}
    reduce = model.reduce

    def noted() -> None:
        reduce()
        tensors: list[Tensor] = list(model.gradients().values())
        tensors += [p.grad for p in model.module.parameters() if p.grad is not None]
        found.update((n, memory.bytes([n])) for n in memory.numbers(tensors))

    model.reduce = noted  # type: ignore[method-assign]
    return found


def _memory(built: Built, memory: MemoryLog, gradients: dict[int, int], start: int) -> Memory:
    parameters = memory.numbers(built.model.module.parameters())
    masters = memory.numbers(p.values for p in built.model.masters().values()) - parameters
    moments = memory.numbers(p.values for p in built.optimizer.state_tensors().values())
    known = parameters | masters | moments | gradients.keys()
    return Memory(
        parameters=memory.bytes(parameters),
        masters=memory.bytes(masters),
        gradients=sum(gradients.values()),
        optimizer=memory.bytes(moments),
        activations=memory.peak(start, known),
        peak=memory.peak(start),
    )
