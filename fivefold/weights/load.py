"""From a source to a decoder that holds its weights."""

from __future__ import annotations

import torch
from torch import nn

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
    check_tensors(source, {name: tuple(p.shape) for name, p in decoder.named_parameters()})
    for name, tensor in source.tensors(dtype, device):
        owner, _, leaf = name.rpartition(".")
        setattr(decoder.get_submodule(owner), leaf, nn.Parameter(tensor))
    return decoder
