"""The times that a pipeline really took, as a Timeline to draw and to compare with the simulation."""

from __future__ import annotations

import torch.distributed as dist

from fivefold.axes.pp.runtime import PipelineRuntime
from fivefold.axes.pp.timeline import Span, Timeline


def measured_timeline(runtime: PipelineRuntime, group: dist.ProcessGroup | None) -> Timeline:
    """All ranks' spans of the last `run` with `record`, in seconds from the first start.

    Every rank of `group` calls it and gets the whole. On several machines it is as good as their clocks
    agree.
    """
    gathered: list[list[Span]] = [runtime.spans]
    if group is not None:
        gathered = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, runtime.spans, group=group)
    spans = sorted((s for each in gathered for s in each), key=lambda span: span.start)
    zero = spans[0].start
    moved = tuple(Span(s.rank, s.action, s.start - zero, s.end - zero) for s in spans)
    return Timeline(runtime.schedule, moved)
