"""Keys and values of every layer in blocks of a fixed size, which sequences hold in any order.

Which block is whose is decided elsewhere (`scheduling/`): here is the memory alone.
"""

from __future__ import annotations

# L layers, K key/value heads, E head_dim, G value dims
from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.kernels.cpu.attention import CROSSWISE_KEYS
from fivefold.model.config import ModelConfig


class PagedCache:
    """Per layer `keys` [blocks, block_size, K, E] and `values` [blocks, block_size, K, G].

    On a CPU, where blocks are whole panels of its kernels, keys lie dim by dim in memory: a dim's
    of all keys of a block are read at once. Memory is not written before it is used: what attention does not need, it does not read, and
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
        config, size = self._config, self.block_size
        before, dims = (config.num_layers, blocks), (config.head_dim, config.value_dim)
        heads = config.num_kv_heads
        crosswise = self.device.type == "cpu" and size % CROSSWISE_KEYS == 0
        if crosswise:
            self.all_keys = self._empty(*before, heads, dims[0], size).permute(0, 1, 4, 2, 3)
        else:
            self.all_keys = self._empty(*before, size, heads, dims[0])
        """[L, blocks, block_size, K, E]."""
        self.all_values = self._empty(*before, size, heads, dims[1])
        """[L, blocks, block_size, K, G]."""
        self.keys, self.values = list(self.all_keys), list(self.all_values)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer; all sources are read first."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, device=self.device).unbind(1)
        for tensor in (self.all_keys, self.all_values):
            tensor.index_copy_(1, destinations, tensor.index_select(1, sources))

    def write(self, layer: int, at: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """Put key [N,K,E] and value [N,K,G] at (blocks [N], offsets in them [N]), both int64."""
        self.keys[layer].index_put_(at, key)
        self.values[layer].index_put_(at, value)


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block, keys and values of all layers."""
    per_token = config.num_layers * config.num_kv_heads * (config.head_dim + config.value_dim)
    return per_token * block_size * dtype.itemsize
