"""Binding of attention.cpp: attention over packed documents and over a cache of blocks."""

from __future__ import annotations

# N queries, M keys, H query heads, K key/value heads, E head_dim, G value dims, S sequences
from ctypes import c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from fivefold.kernels.cpu.library import KernelError, code, function, pointer

CROSSWISE_KEYS = 32  # keys that lie side by side for each dim: the widest panel (gemm.h)
NO_MEMORY, NO_FORMAT, BAD_STARTS, BAD_TABLE = 1, 2, 3, 4  # as in attention_call.h

_ROWS = (c_void_p, c_long, c_long)
FLASH = (
    c_int, *_ROWS * 3, c_void_p, c_void_p, *(c_long,) * 7, c_int, c_long, c_float, c_float,
    c_void_p, c_void_p, c_int,
)  # fmt: skip
FLASH_BACKWARD = (
    c_int, *_ROWS * 5, c_void_p, c_void_p, *(c_long,) * 7, c_int, c_long, c_float, c_float,
    *(c_void_p,) * 4, c_int,
)  # fmt: skip
PAGED = (
    c_int, *_ROWS, c_void_p, *(c_long,) * 4, c_void_p, *(c_long,) * 3, *(c_void_p,) * 3, *(c_long,) * 9,
    c_long, c_float, c_float, c_void_p, c_int,
)  # fmt: skip


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """As `kernels.flash_attention`. Raises `KernelError` for operands that do not fit."""
    check_documents(query, key, value, query_starts, key_starts, causal, window)
    query, key, value = (rows_in_one_piece(x) for x in (query, key, value))
    out = query.new_empty(*query.shape[:2], value.shape[2])
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    status = function("fivefold_flash_attention", *FLASH)(
        code(query), *_rows(query), *_rows(key), *_rows(value), pointer(query_starts),
        pointer(key_starts), *_sizes(query, key, value, query_starts), int(causal), window, scale,
        softcap, pointer(out), pointer(lse), torch.get_num_threads(),
    )  # fmt: skip
    queries, keys = (query_starts, query.shape[0]), (key_starts, key.shape[0])
    _judge(status, query, query_starts=queries, key_starts=keys)
    return out, lse


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.flash_attention_backward`. Raises `KernelError` for operands that do not fit."""
    check_documents(query, key, value, query_starts, key_starts, causal, window)
    check_results(grad, query, value, out, lse)
    grad, query, key, value, out = (rows_in_one_piece(x) for x in (grad, query, key, value, out))
    lse = lse.contiguous()
    grads = tuple(x.new_empty(x.shape) for x in (query, key, value))
    status = function("fivefold_flash_attention_backward", *FLASH_BACKWARD)(
        code(query), *_rows(grad), *_rows(query), *_rows(key), *_rows(value), *_rows(out),
        pointer(query_starts), pointer(key_starts), *_sizes(query, key, value, query_starts),
        int(causal), window, scale, softcap, pointer(lse), *map(pointer, grads),
        torch.get_num_threads(),
    )  # fmt: skip
    queries, keys = (query_starts, query.shape[0]), (key_starts, key.shape[0])
    _judge(status, query, query_starts=queries, key_starts=keys)
    d_query, d_key, d_value = grads
    return d_query, d_key, d_value


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    window: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """As `kernels.paged_attention`. Raises `KernelError` for operands that do not fit."""
    check_cache(query, key_cache, value_cache, block_table, query_starts, lengths, window)
    _check_cache_strides(key_cache, value_cache)
    query, block_table = rows_in_one_piece(query), block_table.contiguous()
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    status = function("fivefold_paged_attention", *PAGED)(
        code(query), *_rows(query), pointer(key_cache), *key_cache.stride(),
        pointer(value_cache), *value_cache.stride()[:3], pointer(block_table),
        pointer(query_starts), pointer(lengths), query.shape[0], *key_cache.shape[:2],
        block_table.shape[1], lengths.shape[0], query.shape[1], key_cache.shape[2],
        query.shape[2], value_cache.shape[3], window, scale, softcap, pointer(out),
        torch.get_num_threads(),
    )  # fmt: skip
    if status == BAD_TABLE:
        raise table_error(key_cache, block_table, lengths)
    _judge(status, query, query_starts=(query_starts, query.shape[0]))
    return out


def _check_cache_strides(key_cache: Tensor, value_cache: Tensor) -> None:
    if value_cache.stride(3) != 1 and value_cache.shape[3] > 1:
        raise KernelError(f"a cache's values lie in one piece, not {value_cache.stride(3)} apart")
    crosswise = key_cache.stride(1) == 1 and key_cache.shape[1] % CROSSWISE_KEYS == 0
    if key_cache.stride(3) != 1 and key_cache.shape[3] > 1 and not crosswise:
        raise KernelError(
            f"a cache's keys lie in one piece, or dim by dim with blocks of {CROSSWISE_KEYS} keys; "
            f"not with strides {key_cache.stride()}"
        )


def check_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    window: int,
) -> None:
    """Raise `KernelError` for shapes and formats that are not attention's, in one line."""
    _check_formats(query=query, key=key, value=value)
    _check_whole_numbers(query.device, query_starts=query_starts, key_starts=key_starts)
    if {query.dim(), key.dim(), value.dim()} != {3}:
        raise KernelError(
            "attention takes query [N,H,E], key [M,K,E] and value [M,K,G], not "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if key.shape[:2] != value.shape[:2] or key.shape[2] != query.shape[2]:
        raise KernelError(
            f"key {list(key.shape)} and value {list(value.shape)} do not belong together, or not "
            f"to query {list(query.shape)}"
        )
    _check_sizes(query.shape[1], key.shape[1], query.shape[2], value.shape[2], window)
    if query_starts.shape != key_starts.shape or not query_starts.numel():
        raise KernelError(
            f"starts are [S + 1] for queries and for keys, not {list(query_starts.shape)} "
            f"and {list(key_starts.shape)}"
        )
    if window and not causal:
        raise KernelError(f"a window of {window} keys looks back: it needs causal=True")


def check_results(grad: Tensor, query: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
    """Raise `KernelError` where what forward returned does not belong to its operands."""
    _check_formats(query=query, grad=grad, out=out)
    shape = [*query.shape[:2], value.shape[2]]
    for name, x in (("grad", grad), ("out", out)):
        if list(x.shape) != shape:
            raise KernelError(f"{name} is {shape}, not {list(x.shape)}")
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = [query.shape[1], query.shape[0]]
    if list(lse.shape) != sums or lse.dtype != wide or lse.device != query.device:
        raise KernelError(f"lse is {sums} {wide}, not {list(lse.shape)} {lse.dtype}")


def check_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    window: int,
) -> None:
    """Raise `KernelError` for shapes and formats that are not paged attention's, in one line."""
    _check_formats(query=query, key_cache=key_cache, value_cache=value_cache)
    _check_whole_numbers(query.device, query_starts=query_starts, lengths=lengths)
    if block_table.dtype != torch.int32 or block_table.device != query.device:
        raise KernelError(f"block_table is int32 beside the query, not {block_table.dtype}")
    if query.dim() != 3 or key_cache.dim() != 4 or value_cache.dim() != 4:
        raise KernelError(
            "paged attention takes query [N,H,E] and caches [blocks, block_size, K, E or G], not "
            f"{list(query.shape)}, {list(key_cache.shape)} and {list(value_cache.shape)}"
        )
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.shape[3] != query.shape[2]:
        raise KernelError(
            f"caches {list(key_cache.shape)} and {list(value_cache.shape)} do not belong together, "
            f"or not to query {list(query.shape)}"
        )
    if not key_cache.shape[1]:
        raise KernelError("a cache's blocks hold at least one key, not 0")
    _check_sizes(query.shape[1], key_cache.shape[2], query.shape[2], value_cache.shape[3], window)
    sequences = lengths.shape[0]
    if block_table.dim() != 2 or block_table.shape[0] != sequences:
        raise KernelError(f"block_table is [{sequences}, blocks], not {list(block_table.shape)}")
    if query_starts.shape[0] != sequences + 1:
        raise KernelError(f"query_starts is [{sequences + 1}], not {list(query_starts.shape)}")


def check_starts(rows: int, name: str, starts: Tensor) -> None:
    """Raise `KernelError` for cumulative starts that fall or leave so many rows."""
    before = 0
    for at, start in enumerate(starts.tolist()):
        if start < before:
            raise KernelError(f"{name} never fall: {start} comes after {before} at {at}")
        if start > rows:
            raise KernelError(f"{name} end within {rows} rows, not at {start}")
        before = start


def table_error(cache: Tensor, block_table: Tensor, lengths: Tensor) -> KernelError:
    """What is wrong with a block table or its lengths, one of which is known to be."""
    room = block_table.shape[1] * cache.shape[1]
    for sequence, length in enumerate(lengths.tolist()):
        if not 0 <= length <= room:
            return KernelError(
                f"sequence {sequence} holds 0 to {room} keys by its block table, not {length}"
            )
    wrong = block_table[(block_table < 0) | (block_table >= cache.shape[0])].tolist()
    return KernelError(f"block_table names blocks 0 to {cache.shape[0] - 1}, not {wrong[0]}")


def rows_in_one_piece(x: Tensor) -> Tensor:
    """`x`, copied only where its last dimension has gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_formats(**tensors: Tensor) -> None:
    first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.dtype != first.dtype or x.device != first.device:
            raise KernelError(
                f"{name} is {first.dtype} on {first.device} as the others, "
                f"not {x.dtype} on {x.device}"
            )


def _check_whole_numbers(device: torch.device, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype != torch.int32 or x.dim() != 1 or x.device != device or not x.is_contiguous():
            raise KernelError(
                f"{name} is one row of int32 on {device}, not {list(x.shape)} {x.dtype} "
                f"on {x.device}"
            )


def _check_sizes(heads: int, kv_heads: int, head_dim: int, value_dim: int, window: int) -> None:
    if not kv_heads or not heads or heads % kv_heads:
        raise KernelError(f"{heads} query heads do not share {kv_heads} key heads evenly")
    if not head_dim or not value_dim:
        raise KernelError("head_dim and value dims are at least 1, not 0")
    if window < 0:
        raise KernelError(f"a window is a number of keys, or 0 for none, not {window}")


def _rows(x: Tensor) -> tuple[int | None, int, int]:
    return pointer(x), x.stride(0), x.stride(1)


def _sizes(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> tuple[int, ...]:
    heads, kv_heads = query.shape[1], key.shape[1]
    sequences = starts.shape[0] - 1
    rows = query.shape[0], key.shape[0]
    return *rows, sequences, heads, kv_heads, query.shape[2], value.shape[2]


def _judge(status: int, query: Tensor, **starts: tuple[Tensor, int]) -> None:
    """Raise what a failure of the C++ means; `starts` are handed over with their rows."""
    if status == NO_MEMORY:
        raise KernelError(f"no memory for attention of {list(query.shape)}")
    if status:
        for name, (x, rows) in starts.items():
            check_starts(rows, name, x)
        raise KernelError(f"attention failed with status {status}")
