"""Adding gradients that several ranks compute in part: the small rest beside the data axis.

Under tensor parallelism the weights that every rank holds whole (norms on sequence shards, shared
key/value heads) get a part of their gradient on each rank; a tied embedding gets one on the first
and one on the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def add_parts(
    gradients: Mapping[str, Tensor], sums: Sequence[tuple[str, dist.ProcessGroup]]
) -> None:
    """Sum the gradients named in `sums` in place, one collective a group."""
    names: dict[dist.ProcessGroup, list[str]] = {}
    for name, group in sums:
        names.setdefault(group, []).append(name)
    for group, held in names.items():
        _add([gradients[name] for name in held], group)


def _add(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()
