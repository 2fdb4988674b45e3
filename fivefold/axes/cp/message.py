"""Keys and values as the one tensor that travels: [T,B,K,E+W], contiguous."""

from __future__ import annotations

# B batch, T tokens, K key/value heads, E head_dim of keys, W head_dim of values
import torch
from torch import Tensor


def pack(key: Tensor, value: Tensor) -> Tensor:
    """[T,B,K,E+W] of [B,T,K,E] and [B,T,K,W]: tokens outermost, so that parts of it follow on."""
    return torch.cat((key, value), dim=-1).transpose(0, 1).contiguous()


def heads_first(message: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Views [B,K,T,E] and [B,K,T,W] of a message."""
    view = message.permute(1, 2, 0, 3)
    return view[..., :key_dim], view[..., key_dim:]


def unpack(message: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Views [B,T,K,E] and [B,T,K,W] of a message."""
    view = message.transpose(0, 1)
    return view[..., :key_dim], view[..., key_dim:]
