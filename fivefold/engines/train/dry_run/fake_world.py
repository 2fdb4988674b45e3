"""One rank of a world that is not there: its process group, its tensors, its kernels.

Tensors have shapes and no values (torch's FakeTensorMode), collectives return at once (torch's
fake process group). What a step reads back to the host (the loss, the norm, counts of targets)
is answered with one. So is the number of places that `nonzero` finds, which packed attention asks
for the starts of documents: they pass as one document, and no size of its own depends on how many
there are. Kernels are those of a device that multiplies in low precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.axes.mesh import build_mesh
from fivefold.core.environment import Ranks
from fivefold.core.errors import TrainingError
from fivefold.core.layout import Layout
from fivefold.engines.train.process import Process
from fivefold.kernels import dispatch

ITEM = torch.ops.aten._local_scalar_dense.default
NONZERO = torch.ops.aten.nonzero.default
LIFT = torch.ops.aten.lift_fresh.default
DEVICE = torch.ops.prim.device.default


@contextmanager
def fake_world(layout: Layout, rank: int) -> Iterator[Process]:
    """Be `rank` of `layout`. Raises TrainingError in a process that has a process group."""
    if dist.is_initialized():
        raise TrainingError("a dry run cannot be started by a rank of a run", "leave torchrun out")
    world = layout.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    native = dispatch.NATIVE_ON_CPU
    dispatch.NATIVE_ON_CPU = frozenset({torch.bfloat16, torch.float16})
    try:
        mesh = build_mesh(layout, "cpu") if world > 1 else None
        if mesh is not None:
            # Torch's meshes compute with values, so they are made before tensors have none.
            _ = mesh.state_mesh, mesh.expert_state_mesh
        process = Process(Ranks(rank, world, 0, 1, 0), torch.device("cpu"), mesh)
        with FakeTensorMode(allow_non_fake_inputs=True), _HostReads():
            yield process
    finally:
        dispatch.NATIVE_ON_CPU = native
        dist.destroy_process_group()


class _HostReads(TorchDispatchMode):
    """Answers reads of values; lets the mesh compute with its own, which are real."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and keeping the compiler out costs time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is ITEM and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        if func is NONZERO and isinstance(args[0], FakeTensor):
            return args[0].new_empty((1, args[0].ndim), dtype=torch.int64)
        if func is not LIFT and _all_real(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _all_real(args: Any, kwargs: Any) -> bool:
    if args and isinstance(args[0], FakeTensor):
        return False
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return bool(tensors) and not any(isinstance(x, FakeTensor) for x in tensors)
