"""Side losses against their definitions, the bias, and the statistics of a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_cases import logits, tokens
from moe_model_cases import decoder, mixture, mixtures, states
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fivefold.core.config import MoESection
from fivefold.core.errors import ConfigError
from fivefold.model.balance import configure
from fivefold.model.load import LayerLoad
from fivefold.model.moe import MixtureOfExperts

BATCH, LENGTH = 3, 8


def alone(layer: MixtureOfExperts, hidden: torch.Tensor, **section: Any) -> torch.Tensor:
    """Gradient of the router's weight through the side losses alone, scale 1."""
    balance = configure(layer, MoESection(**section))
    balance.scale = 1.0
    layer.zero_grad()
    (layer(hidden) * 0.0).sum().backward()
    assert layer.router.weight.grad is not None
    return layer.router.weight.grad.clone()


def slope(layer: MixtureOfExperts, loss: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, layer.router.weight)[0]


def shares(layer: MixtureOfExperts, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [N,X], and 0 or 1 for each expert chosen [N,X]."""
    routing = layer.router(hidden.flatten(0, 1))
    chosen = torch.zeros_like(routing.scores).scatter_(1, routing.choice, 1.0)
    return routing.scores / routing.scores.sum(-1, keepdim=True), chosen


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_auxiliary_loss(family: str) -> None:
    layer, hidden = mixture(family), states(BATCH, LENGTH, 24)
    given, chosen = shares(layer, hidden)
    count = BATCH * LENGTH
    frequency = chosen.mean(0) * layer.moe.experts / layer.moe.top_k
    loss = 0.01 * count * (frequency * given.mean(0)).sum()
    torch.testing.assert_close(alone(layer, hidden, aux_loss=0.01), slope(layer, loss))


def test_the_auxiliary_loss_is_that_of_transformers_over_top_k() -> None:
    layer, hidden = mixture("mixtral"), states(BATCH, LENGTH, 24)
    scores = layer.router(hidden.flatten(0, 1)).logits
    theirs = load_balancing_loss_func((scores,), layer.moe.experts, layer.moe.top_k)
    loss = theirs * BATCH * LENGTH / layer.moe.top_k
    torch.testing.assert_close(
        alone(layer, hidden, aux_loss=1.0), slope(layer, loss), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_loss_of_each_sequence(family: str) -> None:
    layer, hidden = mixture(family), states(BATCH, LENGTH, 24)
    given, chosen = (t.view(BATCH, LENGTH, -1) for t in shares(layer, hidden))
    frequency = chosen.mean(1) * layer.moe.experts / layer.moe.top_k
    loss = 0.1 * LENGTH * (frequency * given.mean(1)).sum()
    torch.testing.assert_close(alone(layer, hidden, sequence_aux_loss=0.1), slope(layer, loss))


def test_the_z_loss() -> None:
    layer, hidden = mixture("qwen3_moe"), states(BATCH, LENGTH, 24)
    scores = layer.router(hidden.flatten(0, 1)).logits
    loss = 0.1 * scores.exp().sum(-1).log().square().sum()
    torch.testing.assert_close(alone(layer, hidden, router_z_loss=0.1), slope(layer, loss))


def test_even_load_costs_the_coefficient_a_token() -> None:
    from fivefold.model.side_loss import balance

    counts = torch.full((4,), 6.0)  # 12 tokens, 2 choices each, 4 experts
    assert balance(counts, torch.full((4,), 3.0)) == 12


def test_the_scale_is_read_when_backward_runs() -> None:
    layer, hidden = mixture("mixtral"), states(BATCH, LENGTH, 24)
    once = alone(layer, hidden, aux_loss=0.1)
    balance = configure(layer, MoESection(aux_loss=0.1))
    layer.zero_grad()
    out = layer(hidden)
    balance.scale = 0.125
    (out * 0.0).sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, once * 0.125)


@pytest.mark.parametrize("section", [{"aux_loss": 0.1}, {"sequence_aux_loss": 0.1}])
def test_parts_of_sequences_add_up_to_the_whole(section: dict[str, float]) -> None:
    """As with context parallelism: counts are summed over the parts, nothing else is."""
    layer, hidden = mixture("deepseek_v3"), states(BATCH, LENGTH, 24)
    whole = alone(layer, hidden, **section)
    parts = hidden.split((3, 5), dim=1)
    counts = []
    for part in parts:
        chosen = shares(layer, part)[1].view(BATCH, part.shape[1], -1)
        counts.append(chosen.sum(1))
    layer.sequence_sum = lambda _: counts[0] + counts[1]
    found = alone(layer, parts[0], **section) + alone(layer, parts[1], **section)
    torch.testing.assert_close(found, whole)
    layer.sequence_sum = lambda own: own  # the fault
    wrong = alone(layer, parts[0], **section) + alone(layer, parts[1], **section)
    assert (wrong - whole).abs().max() > 1e-3


def test_losses_hold_under_recomputation_and_leave_the_output_alone() -> None:
    model = decoder("deepseek_v3", dtype=torch.float64)
    ids = tokens(2, 9)
    plain_logits = logits(model, ids)
    grads = []
    for recompute in (False, True):
        again = copy.deepcopy(model)
        balance = configure(again, MoESection(aux_loss=0.01, router_z_loss=0.01))
        balance.scale = 3.0
        for block in again.layers if recompute else ():
            plain = block.forward
            block.forward = lambda *a, plain=plain: checkpoint(plain, *a, use_reentrant=False)
        out = logits(again, ids)
        assert torch.equal(out, plain_logits)
        out.square().sum().backward()
        grads.append({n: p.grad for n, p in again.named_parameters()})
    for name, expected in grads[0].items():
        assert torch.equal(grads[1][name], expected), name


def test_the_bias_moves_towards_even_load_once_a_step() -> None:
    model = decoder("deepseek_v3")
    balance = configure(model, MoESection(bias_update_rate=0.125))
    before = [m.router.bias.clone() for m in mixtures(model)]  # type: ignore[union-attr]
    for seed in range(2):  # two micro-batches
        logits(model, tokens(2, 9, seed=seed)).sum().backward()
    with torch.no_grad():
        logits(model, tokens(2, 9, seed=5))  # evaluation does not count
    # Another rank, where the last expert of each layer was chosen by everybody.
    other = torch.zeros(2, 9, dtype=torch.int64)
    other[:, 7] = 500
    balance.update(lambda counts: counts + other)
    for row, (layer, bias) in enumerate(zip(mixtures(model), before, strict=True)):
        told = balance.statistics()[f"layers.{layer.layer}"]
        load = torch.tensor(told["tokens"])
        assert load.sum() == 2 * 2 * 9 * 3 + 500
        step = torch.where(load < load.double().mean(), 0.125, -0.125)
        torch.testing.assert_close(layer.router.bias, bias + step)
        assert step[7] == -0.125
        assert layer.load.total(torch.device("cpu")).sum() == 0, row


def test_evenly_loaded_experts_keep_their_bias() -> None:
    from fivefold.model.balance import shift_bias

    bias = torch.zeros(3)
    shift_bias(bias, torch.tensor([4, 4, 4]), 0.1)
    assert not bias.any()


def test_statistics() -> None:
    even, alone_ = LayerLoad((5, 5, 5, 5), 0), LayerLoad((0, 0, 12, 0), 4)
    assert (even.max_over_mean, even.entropy) == (1.0, pytest.approx(1.0))
    assert (alone_.max_over_mean, alone_.entropy) == (4.0, 0.0)
    assert alone_.as_dict() == {
        "tokens": [0, 0, 12, 0], "max_over_mean": 4.0, "dropped": 4, "entropy": 0.0,
    }  # fmt: skip
    assert LayerLoad((0, 0), 0).as_dict()["max_over_mean"] == 0.0


def test_statistics_of_a_capacity() -> None:
    model = decoder("mixtral")
    balance = configure(model, MoESection(capacity_factor=0.5))
    assert balance.statistics() == {}
    logits(model, tokens(2, 10)).sum().backward()
    balance.update(lambda counts: counts)
    told = balance.statistics()
    assert list(told) == ["layers.0", "layers.1", "layers.2"]
    # 20 tokens, 2 choices, 5 experts: each takes 4, so that at least 20 of 40 go without.
    assert all(layer["dropped"] >= 20 for layer in told.values())  # type: ignore[operator]


def test_a_bias_rate_without_a_bias_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bias_update_rate=0.001 needs routers with a bias"):
        configure(decoder("mixtral"), MoESection(bias_update_rate=0.001))


def test_a_dense_decoder_has_nothing_to_balance() -> None:
    model = decoder("qwen3_moe", mlp_only_layers=[0, 1, 2])
    balance = configure(model, MoESection(aux_loss=0.1))
    balance.update(lambda counts: pytest.fail("nothing to sum"))
    assert balance.statistics() == {}
