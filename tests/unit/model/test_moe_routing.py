"""Routing, dispatch, capacity and replay, each against a plain statement of what it should do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import logits, tokens
from moe_model_cases import decoder, mixture, mixtures, states
from torch.utils.checkpoint import checkpoint

from fivefold.core.errors import TrainingError
from fivefold.model.capacity import capacity, drop_beyond
from fivefold.model.dispatch import DROPPED, LocalDispatch
from fivefold.model.moe import MixtureOfExperts
from fivefold.model.replay import recorded, replayed

held = settings(deadline=None, derandomize=True, max_examples=40)


def by_hand(layer: MixtureOfExperts, hidden: torch.Tensor) -> torch.Tensor:
    """[N,D], token by token and expert by expert."""
    routing = layer.router(hidden)
    rows = []
    for state, choice, weight in zip(hidden, routing.choice, routing.weight, strict=True):
        total = torch.zeros_like(state)
        for expert, share in zip(choice.tolist(), weight, strict=True):
            gate, up, down = (getattr(layer.experts, n)[expert] for n in ("gate", "up", "down"))
            total = total + share * (down @ (torch.nn.functional.silu(gate @ state) * (up @ state)))
        rows.append(total)
    out = torch.stack(rows)
    return out if layer.shared is None else out + layer.shared(hidden)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_a_mixture_is_the_weighted_sum_of_its_experts(family: str) -> None:
    layer = mixture(family)
    results = []
    for function in (lambda h: layer(h).flatten(0, 1), lambda h: by_hand(layer, h.flatten(0, 1))):
        layer.zero_grad()
        hidden = states(2, 9, 24).requires_grad_()
        out = function(hidden)
        (out * states(*out.shape, seed=1)).sum().backward()
        results.append([out, hidden.grad, *(p.grad for p in layer.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_no_tokens_at_all_still_have_gradients() -> None:
    layer = mixture("deepseek_v3")
    layer(states(1, 0, 24).requires_grad_()).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.experts.parameters())


def test_the_bias_takes_part_in_choosing_and_not_in_weights() -> None:
    router = mixture("deepseek_v3", n_group=1, topk_group=1).router
    assert router.bias is not None
    hidden = states(20, 24)
    router.bias.zero_()
    router.bias[3] = 10.0
    routing = router(hidden)
    assert (routing.choice == 3).any(-1).all()
    scores = (hidden @ router.weight.mT).sigmoid().gather(1, routing.choice)
    expected = scores / scores.sum(-1, keepdim=True) * 2.5
    torch.testing.assert_close(routing.weight, expected)


def test_experts_are_chosen_inside_the_best_groups() -> None:
    layer = mixture("deepseek_v3")
    router = layer.router
    scores = states(50, 8).sigmoid()
    choice = router.choose(scores)
    assert router.bias is not None
    ranking = scores + router.bias
    for row, chosen in zip(ranking, choice, strict=True):
        pairs = row.view(4, 2).sum(-1).topk(2).indices.tolist()
        members = [2 * group + i for group in pairs for i in range(2)]
        best = sorted(members, key=lambda e: -row[e])[:3]
        assert chosen.tolist() == best


def test_routers_compute_in_fp32_in_a_bf16_model() -> None:
    router = mixture("qwen3_moe", torch.bfloat16).router
    routing = router(states(9, 24).bfloat16())
    assert {t.dtype for t in (routing.logits, routing.scores, routing.weight)} == {torch.float32}
    wide = states(9, 24).bfloat16().double() @ router.weight.double().mT
    assert (routing.logits - wide).abs().max() < 1e-4


@held
@given(st.integers(0, 12), st.integers(1, 4), st.integers(4, 7), st.data())
def test_dropped_choices_add_nothing(
    count: int, ways: int, experts: int, data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    choice = torch.rand(count, experts, generator=generator).topk(ways).indices
    dropped = torch.rand(choice.shape, generator=generator) < 0.5
    weight = states(count, ways, seed=seed + 1)
    hidden = states(count, 3, seed=seed + 2)
    factors = torch.arange(1, experts + 1, dtype=torch.float64)

    def run(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert counts.sum() == len(rows)
        return rows * factors.repeat_interleave(counts).unsqueeze(-1)

    found = LocalDispatch(experts)(
        hidden, choice.masked_fill(dropped, DROPPED), weight, run, dropless=False
    )
    expected = hidden * (factors[choice] * weight * ~dropped).sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected)


@held
@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 3), st.integers(0, 99))
def test_an_expert_takes_its_first_tokens_by_place(
    rows: int, places: int, limit: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    choice = torch.rand(rows, places, 4, generator=generator).topk(2).indices
    found = drop_beyond(choice, 4, limit)
    taken = [0] * 4
    for place in range(places):
        for row in range(rows):
            for way in range(2):
                expert = int(choice[row, place, way])
                fits = taken[expert] < limit
                taken[expert] += fits
                assert found[row, place, way] == (expert if fits else DROPPED)
    # What comes later changes nothing.
    assert torch.equal(drop_beyond(choice[:, :-1], 4, limit), found[:, :-1])


def test_a_capacity_drops_and_counts() -> None:
    layer = mixture("mixtral")
    hidden = states(2, 10, 24)
    free = layer(hidden)
    layer.load.reset()
    layer.capacity_factor = 1.0
    tight = layer(hidden)
    limit = capacity(20, 2, 5, 1.0)
    load = layer.load.total(torch.device("cpu"))
    assert limit == 8
    assert load[:-1].sum() == 40
    assert load[-1] == (load[:-1] - limit).clamp(min=0).sum() > 0
    assert not torch.equal(tight, free)
    layer.capacity_factor = 100.0
    assert torch.equal(layer(hidden), free)


def test_choices_are_recorded_and_forced() -> None:
    first, second = decoder("qwen3_moe", seed=0), decoder("qwen3_moe", seed=1)
    ids = tokens(2, 9)
    routers, others = (
        {f"layers.{m.layer}": m.router for m in mixtures(model)} for model in (first, second)
    )
    with recorded(routers) as choices:
        logits(first, ids)
        logits(first, ids.flip(1))
    assert [len(passes) for passes in choices.values()] == [2, 2]
    with recorded(others) as own:
        logits(second, ids)
    assert not torch.equal(own["layers.0"][0], choices["layers.0"][0])
    for block in second.layers:
        plain = block.forward
        block.forward = lambda *a, plain=plain: checkpoint(plain, *a, use_reentrant=False)
    seen = []
    with replayed(others, choices):
        for layer in mixtures(second):
            plain = layer.dispatcher
            layer.dispatcher = lambda h, c, *a, plain=plain, **k: (
                seen.append(c) or plain(h, c, *a, **k)
            )
        logits(second, ids).sum().backward()
        logits(second, ids.flip(1)).sum().backward()
    order = [("layers.0", 0), ("layers.2", 0), ("layers.2", 0), ("layers.0", 0)]
    order += [(name, 1) for name, _ in order]
    assert all(torch.equal(s, choices[n][i]) for s, (n, i) in zip(seen, order, strict=True))
    assert all(router.replay is None for router in others.values())
    assert all(router.weight.grad.any() for router in others.values())  # type: ignore[union-attr]


def test_a_replay_that_does_not_fit_is_refused() -> None:
    layer = mixture("mixtral")
    with recorded({"it": layer.router}) as choices:
        layer(states(1, 4, 24))
    with replayed({"it": layer.router}, choices):
        layer(states(1, 4, 24))
        with pytest.raises(TrainingError, match="it has 1 recorded passes, and runs another"):
            layer(states(1, 4, 24))
    with (
        replayed({"it": layer.router}, choices),
        pytest.raises(TrainingError, match=r"recorded choices \[4, 2\] in pass 0, which now has"),
    ):
        layer(states(1, 5, 24))
