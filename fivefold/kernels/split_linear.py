"""`x @ weight.T + bias` for a few fp32 rows on a CPU: the outputs are shared out among threads.

The BLAS behind F.linear leaves products with a few rows to one thread, which reaches half of two
cores' memory bandwidth or less. As a batch of products, one a thread over its part of the
outputs, they run side by side; each output is still the sum over the inputs in one place.
"""

from __future__ import annotations

# N rows, I inputs, O outputs, T threads
import torch
from torch import Tensor

FEW_ROWS = 8
LEAST_ELEMENTS = 1 << 17  # of a weight; for less, waking a thread costs more than it saves


def is_split(x: Tensor, weight: Tensor) -> bool:
    """Whether `split_linear` is the faster one and its parts come out equal."""
    threads = torch.get_num_threads()
    return (
        threads > 1
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and 0 < x.numel() <= FEW_ROWS * x.shape[-1]
        and weight.shape[0] % threads == 0
        and weight.numel() >= LEAST_ELEMENTS
        and weight.is_contiguous()
    )


def parts_of(weight: Tensor) -> Tensor:
    """Each thread's part of a weight [O, I], as a view: [T, I, O/T]."""
    outputs, inputs = weight.shape
    threads = torch.get_num_threads()
    return weight.view(threads, outputs // threads, inputs).transpose(1, 2)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] times [O, I] transposed, plus [O], where O is a multiple of the threads."""
    outputs, inputs = weight.shape
    parts = parts_of(weight)
    product = torch.bmm(x.reshape(1, -1, inputs).expand(parts.shape[0], -1, inputs), parts)
    y = product.transpose(0, 1).reshape(*x.shape[:-1], outputs)
    return y if bias is None else y.add_(bias)
