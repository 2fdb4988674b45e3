"""Backward in two gives what backward in one gives, and fires each hook as often."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fivefold.axes.pp import weight_gradients
from fivefold.axes.pp.weight_gradients import WeightGradients
from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.model.projection import Projection

CONFIG = {
    "model_type": "qwen2", "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


def model(dtype: torch.dtype = torch.float64) -> Decoder:
    """With biases on query, key and value; tied, so that the head is no projection."""
    decoder = Decoder(parse_config(CONFIG), dtype=dtype)
    decoder.initialize(7)
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    return decoder


def loss(decoder: nn.Module, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    tokens = torch.randint(0, 37, (1 + microbatch, 5 + microbatch), generator=generator)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return decoder.logits(decoder(tokens, positions, CausalAttention())).logsumexp(-1).sum()


def plain(microbatches: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    decoder = model(dtype)
    for microbatch in range(microbatches):
        loss(decoder, microbatch).backward()
    return gradients(decoder)


def gradients(decoder: nn.Module) -> dict[str, Tensor]:
    prefix = "_checkpoint_wrapped_module."
    return {
        name.replace(prefix, ""): p.grad
        for name, p in decoder.named_parameters()
        if p.grad is not None
    }


def split(decoder: nn.Module, microbatches: int) -> tuple[WeightGradients, Counter[str]]:
    """All inputs first, then all weights, the other way round."""
    hooks: Counter[str] = Counter()
    for name, parameter in decoder.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooks.update([name]))
    store = WeightGradients(decoder)
    for microbatch in range(microbatches):
        with store.postponing(microbatch):
            loss(decoder, microbatch).backward()
    return store, hooks


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(
        float((found[name] - value).abs().max() / value.abs().max())
        for name, value in wanted.items()
    )


@pytest.mark.parametrize("recomputed", [False, True])
def test_inputs_then_weights_is_a_backward(recomputed: bool) -> None:
    wanted = plain(3)
    decoder = model()
    if recomputed:
        for index, layer in enumerate(decoder.layers):
            decoder.layers[index] = checkpoint_wrapper(layer)
    store, hooks = split(decoder, 3)
    early = gradients(decoder)
    assert early and not any("attention.query.w" in n or "down" in n for n in early)
    for microbatch in (2, 0, 1):
        store.deliver(microbatch)
    assert worst(gradients(decoder), wanted) < 1e-12
    assert hooks == dict.fromkeys(
        (n.replace("_checkpoint_wrapped_module.", "") and n for n, _ in decoder.named_parameters()),
        3,
    )


def test_outside_of_it_backward_is_plain_in_every_format() -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        decoder = model(dtype)
        WeightGradients(decoder)
        loss(decoder, 0).backward()
        assert worst(gradients(decoder), plain(1, dtype)) < limit
        with torch.no_grad():
            assert torch.equal(loss(decoder, 1), loss(model(dtype), 1))


def test_a_projection_used_twice_accumulates_once_and_a_frozen_one_never() -> None:
    shared, frozen = Projection(4, 4, dtype=torch.float64), Projection(4, 4, dtype=torch.float64)
    for projection in (shared, frozen):
        torch.nn.init.normal_(projection.weight, generator=torch.Generator().manual_seed(3))
        torch.nn.init.normal_(projection.bias, generator=torch.Generator().manual_seed(4))
    frozen.requires_grad_(False)
    both = nn.Sequential(shared, nn.Tanh(), frozen, nn.Tanh(), shared)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    x.requires_grad_()
    wanted = torch.autograd.grad(both(x).square().sum(), [shared.weight, shared.bias])
    calls: list[int] = []
    shared.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    store = WeightGradients(both)
    with store.postponing(0):
        both(x).square().sum().backward()
    store.deliver(0)
    assert torch.allclose(shared.weight.grad, wanted[0], rtol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(shared.bias.grad, wanted[1], rtol=1e-12)  # type: ignore[arg-type]
    assert calls == [1]
    assert frozen.weight.grad is None


def test_a_projection_of_constants_has_its_gradient_at_once() -> None:
    projection = Projection(4, 2, bias=False, dtype=torch.float64)
    torch.nn.init.normal_(projection.weight, generator=torch.Generator().manual_seed(3))
    x = torch.ones(3, 4, dtype=torch.float64)
    store = WeightGradients(projection)
    with store.postponing(0):
        projection(x).sum().backward()
    assert torch.equal(projection.weight.grad, torch.full((2, 4), 3.0, dtype=torch.float64))  # type: ignore[arg-type]
    store.deliver(0)
    assert float(projection.weight.grad.sum()) == 24  # type: ignore[union-attr]


def test_planted_faults_show() -> None:
    wanted = plain(2)
    real = weight_gradients.weight_gradient

    def last_row_lost(x: Tensor, grad: Tensor) -> Tensor:
        return real(x[..., :-1, :], grad[..., :-1, :])

    for fault in (
        mock.patch.object(weight_gradients, "weight_gradient", last_row_lost),
        mock.patch.object(
            weight_gradients, "bias_gradient", lambda grad: grad.flatten(0, -2).mean(0)
        ),
    ):
        decoder = model()
        with fault:
            store, _ = split(decoder, 2)
            for microbatch in range(2):
                store.deliver(microbatch)
        assert worst(gradients(decoder), wanted) > 1e-3
    decoder = model()
    store, _ = split(decoder, 2)
    store.deliver(0)
    with pytest.raises(KeyError):  # what is delivered is freed
        store.deliver(0)
    assert worst(gradients(decoder), wanted) > 1e-3  # a micro-batch never delivered
    store.forget()
    with pytest.raises(KeyError):
        store.deliver(1)
