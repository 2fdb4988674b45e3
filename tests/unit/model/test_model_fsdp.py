"""FSDP2 around each block and the root: the same numbers as without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from model_cases import FAMILIES, decoder, logits, positions, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder


class Scores(nn.Module):
    """The head's weight is read inside a forward, where FSDP has gathered it."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return logits(self.model, ids, CausalAttention())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: Decoder, policy: MixedPrecisionPolicy) -> Scores:
    scores = Scores(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (1,))
    for part in (*scores.model.layers, scores):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return scores


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_blocks_and_root_equal_the_plain_model(one_rank: None, family: str) -> None:
    model, ids = decoder(family), tokens(2, 9)
    wrapped = sharded(model, MixedPrecisionPolicy())
    expected, found = logits(model, ids), wrapped(ids)
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    gradients = {n: p.grad for n, p in wrapped.model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name].to_local(), parameter.grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_precision_equals_the_model_in_that_format(one_rank: None, family: str) -> None:
    model, ids = decoder(family), tokens(2, 9)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    wrapped = sharded(model, policy)
    narrow = copy.deepcopy(model).bfloat16()
    hidden = narrow(ids, positions(2, 9), CausalAttention())
    assert torch.equal(wrapped(ids), narrow.logits(hidden))
