"""From a model's name and a layout to a model on ranks; what cannot be is refused before it is read."""

from __future__ import annotations

import torch

from fivefold.axes.check import check_model
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.parallel.ranks import Ranks
from fivefold.kernels import dispatch
from fivefold.weights.source import ModelSource


def start_ranks(
    source: ModelSource,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    settings: EngineSettings,
) -> Ranks:
    """Processes for all ranks but this one, and the model on them.

    Raises LayoutError and EngineError for what cannot be served, before a process is started;
    then WeightsError, MemoryBudgetError, RankError.
    """
    check_model(layout, source.config)
    settings.context(source.config)
    ranks = layout.world_size
    _check_devices(ranks, device)
    if settings.weights != "own":
        raise EngineError(
            f"weights={settings.weights!r} takes the native step, which layout {layout} does not",
            'leave weights="own"',
        )
    for axis in ("tp", "ep"):
        ways = getattr(layout, axis)
        if dispatch.is_deterministic() and ways > 1:
            raise LayoutError(
                f"deterministic promises the bits of one process, but {axis}={ways} adds the shares"
                " of ranks up in another order",
                "use pp alone, or leave deterministic",
            )
    return Ranks(source, layout, dtype, device, settings)


def _check_devices(ranks: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    here = torch.cuda.device_count() - (device.index or 0)
    if here < ranks:
        raise LayoutError(
            f"the layout needs {ranks} GPUs, but {here} are here from {device} on",
            "use a smaller layout, or device=cpu",
        )
