"""Even load over experts, for all layers of a decoder: what a training step has to do with it."""

from __future__ import annotations

# X experts
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fivefold.core.config import MoESection
from fivefold.core.errors import ConfigError
from fivefold.model.load import LayerLoad
from fivefold.model.moe import MixtureOfExperts
from fivefold.model.side_loss import BalanceLosses, SideLoss

Sum = Callable[[Tensor], Tensor]


class Balance:
    """Of the mixtures of experts in one decoder, or in one rank's stages of it.

    For each optimizer step: set `scale`, run the micro-batches, call `update` once.
    """

    def __init__(self, layers: list[MixtureOfExperts], side: SideLoss, rate: float) -> None:
        self._layers = layers
        self._side = side
        self._rate = rate
        self._totals: Tensor | None = None  # [layers, X+1] of the last step

    @property
    def scale(self) -> float:
        """What the step multiplies its loss by; side losses are multiplied alike."""
        return self._side.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._side.scale = value

    def update(self, sum_over_ranks: Sum) -> None:
        """End the step: shift the routers' biases (Wang et al. 2024), and start counting anew.

        `sum_over_ranks` adds an int64 tensor over all ranks that hold the same layers and see
        other tokens; every one of them must call this. A bias rises by the rate where an expert
        had less than the mean, and falls by it where it had more.
        """
        if not self._layers:
            return
        rows = [layer.load.total(layer.router.weight.device) for layer in self._layers]
        totals = self._totals = sum_over_ranks(torch.stack(rows))  # one call for all layers
        for layer, total in zip(self._layers, totals, strict=True):
            if self._rate and layer.router.bias is not None:
                shift_bias(layer.router.bias, total[:-1], self._rate)
            layer.load.reset()

    def statistics(self) -> dict[str, dict[str, object]]:
        """Of the step that `update` ended last: for each layer what `LayerLoad` says."""
        if self._totals is None:
            return {}
        loads = [LayerLoad(tuple(row[:-1]), row[-1]) for row in self._totals.tolist()]
        return {
            f"layers.{layer.layer}": load.as_dict()
            for layer, load in zip(self._layers, loads, strict=True)
        }


def configure(decoder: nn.Module, section: MoESection) -> Balance:
    """Set up every mixture of experts in `decoder` as `section` says.

    Raises ConfigError for a bias rate on a model whose routers have no bias.
    """
    layers = [m for m in decoder.modules() if isinstance(m, MixtureOfExperts)]
    if section.bias_update_rate and any(layer.router.bias is None for layer in layers):
        raise ConfigError(
            f"moe.bias_update_rate={section.bias_update_rate} needs routers with a bias, "
            "which this model's family does not have",
            "set moe.bias_update_rate to 0 and moe.aux_loss to e.g. 0.001",
        )
    side = SideLoss()
    coefficients = (section.aux_loss, section.sequence_aux_loss, section.router_z_loss)
    losses = BalanceLosses(*coefficients, side) if any(coefficients) else None
    for layer in layers:
        layer.losses = losses
        layer.capacity_factor = section.capacity_factor
    return Balance(layers, side, section.bias_update_rate)


@torch.no_grad()
def shift_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Move `bias` [X] in place by `rate` towards even `counts` [X]."""
    wide = counts.to(torch.float64)
    bias.add_((wide.mean() - wide).sign().to(bias.dtype), alpha=rate)
