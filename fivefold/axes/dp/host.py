"""Masters, gradients and moments in host memory, for layouts that offload them.

Where CUDA is used the host buffers are pinned and copies do not block the host; without it the same
copies are made from host memory to host memory, so that a CPU run tests what a GPU run does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def host_copy(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A new tensor of `dtype` in host memory with the values of `tensor`."""
    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(tensor)


class HostGradients:
    """Gradients brought to host buffers that live as long as the run."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def fetch(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy all, then wait once: the optimizer on the host reads them next."""
        for name, gradient in gradients.items():
            if name in self._buffers:
                self._buffers[name].copy_(gradient, non_blocking=True)
            else:
                self._buffers[name] = host_copy(gradient, gradient.dtype)
        if any(gradient.is_cuda for gradient in gradients.values()):
            torch.cuda.current_stream().synchronize()
        return dict(self._buffers)
