"""What activation checkpointing keeps and what it computes again, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.axes.apply import apply
from fivefold.core.config import PrecisionSection
from fivefold.core.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.model.objective import Objective

LAYERS, MATMULS = 4, 7  # of one block: query, key, value, output, gate, up, down
CONFIG = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip


class Count(TorchDispatchMode):
    """Calls of matrix products and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operator.name()
        self.products += name in ("aten::mm", "aten::addmm", "aten::bmm", "fivefold::multiply")
        self.attentions += name == "fivefold::flash_attention"
        return operator(*args, **(kwargs or {}))


def run(recompute: str, every: int = 1, dtype: str = "fp32") -> dict[str, Any]:
    torch.manual_seed(0)
    decoder = Decoder(parse_config(CONFIG))
    decoder.initialize(0)
    model = apply(
        Objective(decoder), layout=Layout(), mesh=None,
        precision=PrecisionSection(dtype=dtype), recompute=recompute, recompute_every=every,
    )  # fmt: skip
    tokens = torch.randint(0, 96, (2, 16))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    model.axis.begin(last=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.module(tokens, tokens, torch.arange(16).expand(2, 16), None)
    with Count() as count:
        loss.backward()
    model.reduce()
    return {
        "loss": loss.item(),
        "gradients": {name: g.clone() for name, g in model.gradients().items()},
        "products": count.products,
        "attentions": count.attentions,
        "kept": sum(kept.values()),
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_full_runs_the_chosen_blocks_again(dtype: str, every: int) -> None:
    plain, full = run("none", dtype=dtype), run("full", every, dtype)
    blocks = len(range(0, LAYERS, every))
    # Recomputation stops at the last saved tensor of a block: the final product is not needed.
    assert full["products"] - plain["products"] in (blocks * MATMULS, blocks * (MATMULS - 1))
    assert full["attentions"] - plain["attentions"] == blocks
    assert full["kept"] < plain["kept"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_selective_keeps_products_and_attention(dtype: str) -> None:
    plain, selective, full = (run(mode, dtype=dtype) for mode in ("none", "selective", "full"))
    assert selective["products"] == plain["products"] < full["products"]
    assert selective["attentions"] == plain["attentions"] < full["attentions"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_the_same_bits(dtype: str, mode: str) -> None:
    """The same operators run on the same inputs, so there is no tolerance."""
    plain, again = run("none", dtype=dtype), run(mode, dtype=dtype)
    assert plain["loss"] == again["loss"]
    assert plain["gradients"].keys() == again["gradients"].keys()
    assert all(torch.equal(g, again["gradients"][n]) for n, g in plain["gradients"].items())
