"""Binding of decoder_step.cpp: the blocks of a decoder over one step's tokens, in one call."""

from __future__ import annotations

# N tokens, S sequences, D hidden, H query heads, K key/value heads, E head_dim, F feed-forward, R ropes
import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.kernels.cpu.attention import BAD_TABLE, NO_MEMORY
from fivefold.kernels.cpu.library import FORMATS, KernelError, function, pointer


class _Packed(Structure):
    _fields_ = (("data", c_void_p), ("scale", c_void_p), ("bias", c_void_p))


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in (
            "attention_norm", "feed_forward_norm", "query_norm", "key_norm",
            "attention_post_norm", "feed_forward_post_norm",
        )),
        *((name, _Packed) for name in ("heads", "output", "gate_up", "down")),
        ("window", c_long), ("rope", c_long),
    )  # fmt: skip


class _Shape(Structure):
    _fields_ = (
        *((name, c_long) for name in (
            "layers", "hidden", "heads", "kv_heads", "head_dim", "inner",
        )),
        *((name, c_int) for name in ("format", "activation")),
        *((name, c_float) for name in ("eps", "norm_offset", "scale", "softcap")),
    )  # fmt: skip


class _Cache(Structure):
    _fields_ = (
        ("keys", c_void_p), ("values", c_void_p),
        *((name, c_long) for name in (
            "key_layer", "key_block", "key_stride", "key_head", "key_dim",
            "value_layer", "value_block", "value_stride", "value_head", "blocks", "block_size",
        )),
    )  # fmt: skip


class _Batch(Structure):
    _fields_ = (
        ("tokens", c_long), ("sequences", c_long), ("most_blocks", c_long),
        *((name, c_void_p) for name in (
            "slots", "block_table", "query_starts", "lengths", "cosines", "sines",
        )),
    )  # fmt: skip


STEP = (
    POINTER(_Shape), POINTER(_Layer), POINTER(_Cache), POINTER(_Batch), c_void_p, c_void_p,
    c_void_p, c_int,
)  # fmt: skip


@dataclass(frozen=True)
class Product:
    """A weight as packed.py packs it, the scales [O] of int8, and a bias [O] fp32."""

    data: Tensor
    scale: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class LayerOperands:
    """One block's: norms are fp32, None where the family has none; `window` 0 is none."""

    attention_norm: Tensor
    feed_forward_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_post_norm: Tensor | None
    feed_forward_post_norm: Tensor | None
    heads: Product
    """Query, key and value, one below the other: [(H + 2 K) E, D]."""
    output: Product
    gate_up: Product
    """Gate, then up: [2 F, D]."""
    down: Product
    window: int
    rope: int
    """Which of the tables a step is given."""


@dataclass(frozen=True)
class Numbers:
    """What all blocks share. `activation` is a code of cpu/gated.py; a softcap of 0 is none."""

    dtype: torch.dtype
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    activation: int
    eps: float
    norm_offset: float
    scale: float
    softcap: float


class DecoderStep:
    """A decoder's blocks and final norm, lowered to one call. Holds what its addresses point at."""

    def __init__(
        self, numbers: Numbers, layers: Sequence[LayerOperands], final_norm: Tensor
    ) -> None:
        self._held = (layers, final_norm)
        self.numbers = numbers
        self._final_norm = pointer(final_norm)
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        n = numbers
        self._shape = _Shape(
            len(layers), n.hidden, n.heads, n.kv_heads, n.head_dim, n.inner, FORMATS[n.dtype],
            n.activation, n.eps, n.norm_offset, n.scale, n.softcap,
        )  # fmt: skip
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self,
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        block_table: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        tables: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Embedded tokens [N,D], which are overwritten, to states after the final norm [N,D].

        `keys` and `values` are the caches of all layers [L, blocks, block_size, K, E], of which
        the keys may lie dim by dim (see `paged_attention`); those of the tokens go to `slots` [N]
        int64. `tables` are each rope's cosines and sines [N,F] fp32. The result lies in memory that
        the next call takes again. Raises `KernelError` for slots and tables that are not the
        cache's.
        """
        cosines, sines = (_addresses(each) for each in zip(*tables, strict=True))
        batch = _Batch(
            hidden.shape[0], lengths.shape[0], block_table.shape[1], pointer(slots),
            pointer(block_table), pointer(query_starts), pointer(lengths),
            ctypes.addressof(cosines), ctypes.addressof(sines),
        )  # fmt: skip
        cache = _Cache(
            pointer(keys), pointer(values), *keys.stride(), *values.stride()[:4], *keys.shape[1:3]
        )
        scratch = self._room(hidden.shape[0])
        status = function("fivefold_decoder_step", *STEP)(
            self._shape, self._layers, cache, batch, self._final_norm, pointer(hidden),
            pointer(scratch), torch.get_num_threads(),
        )  # fmt: skip
        if status:
            raise _failure(status, hidden)
        return scratch[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)

    def _room(self, tokens: int) -> Tensor:
        count = function("fivefold_decoder_scratch", POINTER(_Shape), POINTER(_Layer), c_long)
        count.restype = c_long
        needed = count(self._shape, self._layers, tokens)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch


def _layer(given: LayerOperands) -> _Layer:
    norms = (
        given.attention_norm, given.feed_forward_norm, given.query_norm, given.key_norm,
        given.attention_post_norm, given.feed_forward_post_norm,
    )  # fmt: skip
    products = (given.heads, given.output, given.gate_up, given.down)
    packed = (_Packed(pointer(p.data), pointer(p.scale), pointer(p.bias)) for p in products)
    return _Layer(*map(pointer, norms), *packed, given.window, given.rope)


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*map(pointer, tensors))


def _failure(status: int, hidden: Tensor) -> KernelError:
    if status == NO_MEMORY:
        return KernelError(f"no memory for a step of {hidden.shape[0]} tokens")
    if status == BAD_TABLE:
        return KernelError("a step names slots or blocks that the cache does not have")
    return KernelError(f"a decoder's step failed with status {status}")
