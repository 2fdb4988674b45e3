"""Sees every operator of a step, on real tensors or fake ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.engines.train.dry_run.memory import MemoryLog
from fivefold.engines.train.dry_run.traffic import NAMESPACES, Traffic

DEVICE = torch.ops.prim.device.default
WAIT = torch.ops._c10d_functional.wait_tensor.default


@contextmanager
def recording(memory: MemoryLog, traffic: Traffic) -> Iterator[None]:
    """Operators inside are written down."""
    with memory.watching_resizes(), _Recorder(memory, traffic):
        yield


class _Recorder(TorchDispatchMode):
    def __init__(self, memory: MemoryLog, traffic: Traffic) -> None:
        super().__init__()
        self._memory, self._traffic = memory, traffic

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and keeping the compiler out costs time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls
        if func is WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # as the real one does, where torch's fake one takes memory anew
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # come back with what it is made of
        result = func(*args, **(kwargs or {}))
        self._memory.see(result)
        if func.namespace in NAMESPACES:
            self._traffic.see(func, args, result)
        return result
