"""Experts of many ranks in one process, on fake tensors and a fake process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.axes.ep.dispatch import EvenAllToAllDispatch
from fivefold.axes.ep.divide import divide_experts
from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config

RANKS, LAYERS = 64, 3
# DeepSeek-V3's layers, three of its 61.
CONFIG = {
    "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168,
    "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_hidden_layers": LAYERS,
    "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=RANKS)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_of_deepseek_v3s_layers_on_64_ranks(
    group: dist.ProcessGroup, dtype: torch.dtype
) -> None:
    with FakeTensorMode():
        decoder = Decoder(parse_config(CONFIG), dtype=dtype)
        slices = divide_experts(decoder, group, EvenAllToAllDispatch)
        assert {s.sizes[0] for s in slices.values()} == {256 // RANKS}
        assert {s.offsets[0] for s in slices.values()} == {5 * 256 // RANKS}
        tokens = torch.zeros(1, 4096, dtype=torch.int64)
        places = torch.arange(4096)[None]
        with CommDebugMode() as seen:
            decoder(tokens, places, CausalAttention()).sum().backward()
        without = [n for n, p in decoder.named_parameters() if p.grad is None]
        assert without == ["head.weight"]
    # For each layer with experts: counts, there, back, and two gradients.
    assert sum(seen.get_comm_counts().values()) == 5 * (LAYERS - 1)
