"""From a source to a decoder that holds its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.core.errors import WeightsError
from fivefold.model.decoder import Decoder
from fivefold.weights.check import check_tensors
from fivefold.weights.source import ModelSource


def decoder_from(
    source: ModelSource,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder with the source's weights in `dtype` on `device`.

    It is made without memory and takes its tensors one at a time, each converted on the way, so
    that the peak is the model's own size and one tensor. Raises WeightsError when the source has
    no weights, or others than its configuration asks for.
    """
    if not source.has_weights:
        raise WeightsError(
            f"{source.path} holds no weights", "add its safetensors files, or give another model"
        )
    decoder = Decoder(source.config, device="meta", dtype=dtype)
    buffers = dict(decoder.named_buffers())
    held = buffers | dict(decoder.named_parameters())
    check_tensors(source, {name: tuple(tensor.shape) for name, tensor in held.items()})
    for name, tensor in source.tensors(dtype, device):
        if name in buffers:  # which keep a format of their own
            _put(decoder, name, source.get(name, buffers[name].dtype, device))
        else:
            _put(decoder, name, nn.Parameter(tensor))
    return decoder


def _put(decoder: Decoder, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(decoder.get_submodule(owner), leaf, tensor)
