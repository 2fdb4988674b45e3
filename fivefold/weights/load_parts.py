"""From a source to the part of a decoder that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fivefold.axes.part import Slice
from fivefold.core.errors import WeightsError
from fivefold.model.decoder import Decoder
from fivefold.weights.check import check_tensors
from fivefold.weights.source import ModelSource


def check_source(source: ModelSource, whole: Decoder) -> None:
    """Raise WeightsError when it has no weights, or others than those of `whole`."""
    if not source.has_weights:
        raise WeightsError(
            f"{source.path} holds no weights", "add its safetensors files, or give another model"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
    check_tensors(source, shapes)


def load_parts(
    part: Decoder,
    slices: Mapping[str, Slice],
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give `part`, which is on the meta device, its values: the boxes `slices` of the source's.

    One whole tensor is read at a time; `check_source` comes before. Raises WeightsError.
    """
    for name, buffer in list(part.named_buffers()):  # which keep a format of their own
        _put(part, name, source.get(name, buffer.dtype, device))
    for name, _ in list(part.named_parameters()):
        whole = source.get(name, dtype, device)
        box = slices[name].cut(whole)
        # A view would keep the whole in memory.
        _put(part, name, nn.Parameter(box if box.shape == whole.shape else box.clone()))


def _put(decoder: Decoder, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(decoder.get_submodule(owner), leaf, tensor)
