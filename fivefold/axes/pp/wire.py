"""Messages between the ranks of a pipeline: asynchronous, few at a time, errors that say what."""

from __future__ import annotations

from collections import defaultdict, deque

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.pp.program import Transfer
from fivefold.core.errors import TrainingError, one_line

# Sends to one rank that may be on their way at a time. Their tensors are kept until they are over.
WINDOW = 4


class Arrival:
    """A tensor that is being received; `take` waits for it."""

    def __init__(self, tensor: Tensor, work: dist.Work, transfer: Transfer) -> None:
        self._tensor, self._work, self._transfer = tensor, work, transfer

    def take(self) -> Tensor:
        """The tensor, once it is there. Raises TrainingError if it never comes."""
        _wait(self._work, self._transfer, "came from", self._transfer.source)
        return self._tensor


class Wire:
    """Point-to-point messages of one rank inside `group`; ranks are the group's own."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sending: dict[int, deque[tuple[dist.Work, Tensor, Transfer]]] = defaultdict(deque)

    def send(self, tensor: Tensor, transfer: Transfer) -> None:
        """Start sending. Waits only for a send that is `WINDOW` messages old."""
        under_way = self._sending[transfer.target]
        if len(under_way) == WINDOW:
            _finish(*under_way.popleft())
        tensor = tensor.contiguous()
        try:
            work = dist.isend(
                tensor, group=self._group, tag=_tag(transfer), group_dst=transfer.target
            )
        except RuntimeError as error:
            raise _lost(transfer, "could be sent to", transfer.target, error) from error
        assert work is not None
        under_way.append((work, tensor, transfer))

    def receive(self, shape: torch.Size, dtype: torch.dtype, transfer: Transfer) -> Arrival:
        """Start receiving a tensor of `shape`."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        try:
            work = dist.irecv(
                tensor, group=self._group, tag=_tag(transfer), group_src=transfer.source
            )
        except RuntimeError as error:
            raise _lost(transfer, "came from", transfer.source, error) from error
        assert work is not None
        return Arrival(tensor, work, transfer)

    def finish(self) -> None:
        """Wait until everything is sent."""
        for under_way in self._sending.values():
            while under_way:
                _finish(*under_way.popleft())


def _finish(work: dist.Work, tensor: Tensor, transfer: Transfer) -> None:
    del tensor  # was kept until here
    _wait(work, transfer, "could be sent to", transfer.target)


def _wait(work: dist.Work, transfer: Transfer, happened: str, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(transfer, happened, peer, error) from error


def _lost(transfer: Transfer, happened: str, peer: int, error: RuntimeError) -> TrainingError:
    return TrainingError(
        f"no {transfer.in_words} {happened} pipeline rank {peer}: {one_line(error)}",
        f"look for what ended rank {peer} of the pipeline first",
    )


def _tag(transfer: Transfer) -> int:
    """Of its own for each message between two ranks in a batch."""
    kind = 0 if transfer.action.kind == "F" else 1
    # Hidden states and gradients have the same stages; micro-batches number far fewer than this.
    return (transfer.action.microbatch << 12) | (transfer.receiver << 1) | kind
