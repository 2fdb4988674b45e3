"""Keys and values of every layer in blocks of a fixed size, which sequences hold in any order.

Which block is whose is decided elsewhere (`scheduling/`): here is the memory alone.
"""

from __future__ import annotations

# L layers, K key/value heads, E head_dim, G value dims
from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.model.config import ModelConfig


class PagedCache:
    """Per layer `keys` [blocks, block_size, K, E] and `values` [blocks, block_size, K, G].

    Memory is not written before it is used: what attention does not need, it does not read, and
    an operating system that gives pages on first use gives them when blocks fill.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.device = torch.device(device)
        self._config = config
        self.take_memory(num_blocks)

    def take_memory(self, blocks: int) -> None:
        """Memory for so many blocks instead of what there was; what was held is lost."""
        config = self._config
        shape = (blocks, self.block_size, config.num_kv_heads)
        self.keys, self.values = (
            [
                torch.empty((*shape, dim), dtype=self.dtype, device=self.device)
                for _ in config.windows
            ]
            for dim in (config.head_dim, config.value_dim)
        )
        # The same memory as rows of single tokens: [blocks * block_size, K, E or G].
        self.key_rows = [x.flatten(0, 1) for x in self.keys]
        self.value_rows = [x.flatten(0, 1) for x in self.values]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer; all sources are read first."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, device=self.device).unbind(1)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put key [N,K,E] and value [N,K,G] at `slots` [N] int64 (block * block_size + offset)."""
        self.key_rows[layer].index_copy_(0, slots, key)
        self.value_rows[layer].index_copy_(0, slots, value)


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block, keys and values of all layers."""
    per_token = config.num_layers * config.num_kv_heads * (config.head_dim + config.value_dim)
    return per_token * block_size * dtype.itemsize
