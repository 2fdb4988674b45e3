"""AdamW (Loshchilov and Hutter 2019) over fp32 masters, whole or sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fivefold.axes.part import Part
from fivefold.core.config import OptimizerSection

MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterOptimizer:
    """Updates this rank's part of each master in place. Its state is there from the start.

    Weight decay is for matrices, the embedding among them; norms and biases, which have one
    dim, get none.
    """

    def __init__(
        self,
        masters: dict[str, Part],
        gradients: Callable[[], dict[str, Tensor]],
        config: OptimizerSection,
    ) -> None:
        self._masters = masters
        self._gradients = gradients
        self._locals = {name: master.values for name, master in masters.items()}
        self._moments = {
            moment: {name: torch.zeros_like(value) for name, value in self._locals.items()}
            for moment in MOMENTS
        }
        # A rank may hold no rows of a small parameter; there is nothing to update there.
        self._held = {name: value for name, value in self._locals.items() if value.numel()}
        decayed = [v for v in self._held.values() if v.ndim > 1]
        plain = [v for v in self._held.values() if v.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.lr, betas=config.betas, eps=config.eps, fused=True,
        )  # fmt: skip
        self._fill_state()

    def step(self, lr: float) -> None:
        """One update at learning rate `lr` with the gradients as they are now."""
        gradients = self._gradients()
        for name, value in self._held.items():
            value.grad = gradients[name]
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for value in self._held.values():
            value.grad = None

    def state_tensors(self) -> dict[str, Part]:
        """`exp_avg/NAME` and `exp_avg_sq/NAME`, sharded as the masters are; for checkpoints."""
        return {
            f"{moment}/{name}": self._masters[name].like(value)
            for moment, values in self._moments.items()
            for name, value in values.items()
        }

    def scalars(self) -> dict[str, float]:
        """The number of updates made."""
        return {"updates": float(next(iter(self._steps())))}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Continue counting from a checkpoint's number."""
        for count in self._steps():
            count.fill_(scalars["updates"])

    def _steps(self) -> list[Tensor]:
        return [self._adamw.state[value]["step"] for value in self._held.values()]

    def _fill_state(self) -> None:
        for name, value in self._held.items():
            state = {moment: self._moments[moment][name] for moment in MOMENTS}
            count = torch.zeros((), dtype=torch.float32, device=value.device)
            self._adamw.state[value] = {"step": count, **state}
