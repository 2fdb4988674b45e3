"""nn.Linear whose product is fivefold's own `linear`, the seam for faster kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.kernels.gated import Activation, gated
from fivefold.kernels.gated_linear import gated_linear
from fivefold.kernels.linear import linear
from fivefold.kernels.normed_linear import normed_linear, recipe_of
from fivefold.kernels.packed_linear import PackedWeight, pack_weight, packed_linear


class Projection(nn.Linear):
    """[..., I] to [..., O]. Holds what memory held until values are set or loaded.

    packed: the weight once more, in the order in which inference reads it; see `pack`.
    remakes: backward makes its operand again, where a pass over memory does, rather than keep it.
    """

    packed: PackedWeight | None = None
    remakes = True

    def reset_parameters(self) -> None:
        """Nothing: values that torch would draw are thrown away, and on `meta` cost a second."""

    def pack(self) -> None:
        """Repack the weight for passes without gradients, beside itself; again when it changes."""
        self.packed = pack_weight(self.weight)

    @property
    def added_bias(self) -> Tensor | None:
        """The bias [O] that `forward` adds."""
        return self.bias

    def forward(self, input: Tensor) -> Tensor:
        """Apply the weight [O,I] and bias [O]."""
        if not torch.is_grad_enabled():
            if self.packed is not None:
                return apply_packed(input, self.packed, self.added_bias)
        elif self.remakes and (recipe := recipe_of(input)):
            return normed_linear(input, self.weight, self.added_bias, recipe)
        return linear(input, self.weight, self.added_bias)

    def forward_gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """`forward` of gated(gate, up)."""
        if torch.is_grad_enabled() and self.remakes:
            return gated_linear(gate, up, self.weight, self.added_bias, activation)
        return self(gated(gate, up, activation))


def apply_packed(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """[..., I] by a packed [O,I]: [..., O]."""
    wide = None if bias is None else bias.float()
    return packed_linear(x.flatten(0, -2), packed, wide).unflatten(0, x.shape[:-1])
