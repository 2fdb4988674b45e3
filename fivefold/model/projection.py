"""nn.Linear whose product is fivefold's own `linear`, the seam for faster kernels."""

from __future__ import annotations

from torch import Tensor, nn

from fivefold.kernels.linear import linear


class Projection(nn.Linear):
    """[..., I] to [..., O]. Holds what memory held until values are set or loaded."""

    def reset_parameters(self) -> None:
        """Nothing: values that torch would draw are thrown away, and on `meta` cost a second."""

    @property
    def added_bias(self) -> Tensor | None:
        """The bias [O] that `forward` adds."""
        return self.bias

    def forward(self, input: Tensor) -> Tensor:
        """Apply the weight [O,I] and bias [O]."""
        return linear(input, self.weight, self.added_bias)
