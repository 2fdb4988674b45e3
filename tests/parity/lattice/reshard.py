"""Steps on one layout from a checkpoint that another wrote, as a function for workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.core.config import MoESection
from fivefold.engines.train.checkpoint.checkpointer import Checkpointer, TrainState
from tests.dist.cases import LR, Run
from tests.parity.lattice.cases import MOE, PACKED, batches, model_config


def steps(folder: str, layout: str, model: str, start: int, stop: int) -> dict[str, Any]:
    """From step `start` (loaded, unless 0) to `stop` (saved): losses, norms and the final state."""
    run = Run(layout, model_config(model, "pp=4"), "fp64", moe=MOE.get(model, MoESection()))
    keeper = Checkpointer(
        Path(folder), keep=9, asynchronous=True, model_files=lambda path: None, layout=layout
    )
    if start:
        path = keeper.latest()
        assert path is not None and path.name == f"step-{start:08d}"
        loaded = keeper.load(path, _state(run, start))
        run.optimizer.load_scalars(loaded.scalars["optimizer"])
        run.axis.publish()
    rows = []
    for step in range(start, stop):
        result = run.step(batches(step, run.rank, run.ranks, model in PACKED), LR)
        rows.append((result.loss, result.grad_norm))
    keeper.save(_state(run, stop))
    keeper.wait()
    return {"rows": rows, "gradients": [], "state": run.state()}


def _state(run: Run, step: int) -> TrainState:
    held = run.axis.masters() | run.axis.buffers()
    tensors = {f"model/{name}": part for name, part in held.items()}
    moments = {f"optimizer/{name}": part for name, part in run.optimizer.state_tensors().items()}
    return TrainState(step, tensors | moments, {"optimizer": run.optimizer.scalars()})
