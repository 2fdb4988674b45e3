"""Matrices repacked for inference give the bits of the parameters they were made from."""

from __future__ import annotations

import pytest
import torch
from model_cases import FAMILIES, decoder, logits, tokens

from fivefold.kernels import dispatch


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_passes_have_the_same_bits(family: str, dtype: torch.dtype) -> None:
    model, ids = decoder(family, dtype=dtype), tokens(2, 11)
    with dispatch.deterministic(), torch.no_grad():
        expected = logits(model, ids)
        model.pack()
        assert torch.equal(logits(model, ids), expected)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        model.pack()
        changed = logits(model, ids)
        assert not torch.equal(changed, expected)
        for module in model.modules():
            module.__dict__.pop("packed", None)
        model.packed_head = None
        assert torch.equal(logits(model, ids), changed)


def test_passes_with_gradients_use_the_parameters() -> None:
    model = decoder("llama", dtype=torch.bfloat16)
    model.pack()
    logits(model, tokens(1, 5)).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
