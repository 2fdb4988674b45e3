from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fivefold.core.errors import PromptError
from fivefold.engines.serve.filters import draw, likeliest
from fivefold.engines.serve.sampler import Sampler
from fivefold.engines.serve.sampling_params import SamplingParams


def sampler(params: list[SamplingParams], vocab: int, prompts: Any = None, **more: Any) -> Sampler:
    return Sampler(params, prompts or [[0]] * len(params), vocab_size=vocab, **more)


def random_logits(seed: int, rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


params_strategy = st.builds(
    dict,
    temperature=st.floats(0.05, 5.0),
    top_k=st.one_of(st.just(0), st.integers(1, 60)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
)


def hugging_face(row: torch.Tensor, history: list[int], wanted: dict[str, Any]) -> torch.Tensor:
    """The same settings through transformers' processors, in the order `generate` builds them."""
    chain = LogitsProcessorList()
    chain.append(RepetitionPenaltyLogitsProcessor(float(wanted["repetition_penalty"])))
    chain.append(TemperatureLogitsWarper(float(wanted["temperature"])))
    if wanted["top_k"]:
        chain.append(TopKLogitsWarper(wanted["top_k"]))
    chain.append(TopPLogitsWarper(wanted["top_p"]))
    chain.append(MinPLogitsWarper(wanted["min_p"]))
    return chain(torch.tensor([history]), row[None])[0]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(params_strategy, min_size=1, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from([37, 300, 3000]),
)
def test_filters_and_repetition_equal_transformers(
    wanted: list[dict[str, Any]], seed: int, vocab: int
) -> None:
    logits = random_logits(seed, len(wanted), vocab)
    rng = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(vocab, (9,), generator=rng).tolist() for _ in wanted]
    ours = sampler([SamplingParams(**w) for w in wanted], vocab, prompts)
    filtered = ours.filter(ours.adjust(logits))
    for row, w in enumerate(wanted):
        theirs = hugging_face(logits[row], prompts[row], w)
        kept, theirs_kept = filtered[row].isfinite(), theirs.isfinite()
        # a token whose cumulative mass rounds across top_p may differ: allow it only at the edge
        for token in (kept != theirs_kept).nonzero().flatten().tolist():
            probabilities = logits_mass_before(filtered[row], theirs, token)
            assert abs(probabilities - w["top_p"]) < 1e-5
        both = kept & theirs_kept
        torch.testing.assert_close(filtered[row][both], theirs[both], rtol=1e-6, atol=1e-6)


def logits_mass_before(ours: torch.Tensor, theirs: torch.Tensor, token: int) -> float:
    wider = torch.maximum(ours, theirs).double().softmax(-1)
    return float(wider[wider > wider[token]].sum())


def test_repetition_counts_prompt_and_output_the_others_only_output() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.125)
    ours = sampler([params], 4, [[0, 1, 1]])
    assert ours.adjust(logits).tolist() == [[1.0, -4.0, 1.0, 0.5]]
    assert ours.sample(logits).tokens == [0]  # the first of two equals
    assert ours.adjust(logits).tolist() == [[0.625, -4.0, 1.0, 0.5]]
    assert ours.sample(logits).tokens == [2]
    assert ours.sample(torch.tensor([[0.0, 0.0, 9.0, 0.0]])).tokens == [2]
    assert ours.adjust(logits)[0, 2].item() == pytest.approx(1.0 / 2 - 2 * 0.25 - 0.125)
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.5]]


def test_logit_bias_comes_before_the_penalties() -> None:
    params = SamplingParams(logit_bias={1: 5.0, 2: -100.0}, repetition_penalty=2.0)
    ours = sampler([params], 3, [[1]])
    assert ours.adjust(torch.tensor([[1.0, 1.0, 1.0]])).tolist() == [[1.0, 3.0, -99.0]]


def test_min_tokens_masks_every_ending_as_transformers_does() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[4])
    ours = sampler([params], 6, end_tokens=(1, 2))
    logits = random_logits(0, 1, 6)
    for step in range(3):
        masked = ours.adjust(logits)
        theirs = MinNewTokensLengthLogitsProcessor(1, 2, [1, 2, 4])(
            torch.zeros(1, 1 + step, dtype=torch.long), logits
        )
        assert torch.equal(masked, theirs)
        ours.sample(logits)


def test_greedy_ignores_truncation_and_equals_argmax() -> None:
    logits = random_logits(1, 5, 100)
    params = [SamplingParams(top_k=3, top_p=0.5, min_p=0.4, seed=n) for n in range(5)]
    assert sampler(params, 100).sample(logits).tokens == logits.argmax(-1).tolist()


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """(statistic, its 4-sigma limit) over the tokens that may be drawn."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    return statistic, freedom + 4 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 8},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("by", ["seed", "step"])
def test_draws_follow_the_distribution(wanted: dict[str, float], by: str) -> None:
    """20 000 draws: over as many seeds, and along one seed's stream."""
    draws, vocab = 20_000, 24
    row = random_logits(5, 1, vocab, spread=1.0)
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, **wanted}
    probabilities = hugging_face(row[0], [0], full).double().softmax(-1)
    params = SamplingParams(**wanted, seed=3)  # type: ignore[arg-type]
    if by == "seed":
        many = [SamplingParams(**wanted, seed=s) for s in range(draws)]  # type: ignore[arg-type]
        tokens = sampler(many, vocab).sample(row.expand(draws, vocab)).tokens
    else:
        ours = sampler([params], vocab)
        tokens = [ours.sample(row).tokens[0] for _ in range(draws // 4)]
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab).double()
    statistic, limit = chi_square(counts, probabilities)
    assert statistic < limit


def test_a_seeded_row_is_the_same_in_any_batch() -> None:
    vocab = 500
    logits = random_logits(2, 6, vocab)
    params = [
        SamplingParams(temperature=1.0, seed=10),
        SamplingParams(temperature=0.7, top_k=5, seed=11),
        SamplingParams(),
        SamplingParams(temperature=1.3, top_p=0.9, seed=12),
        SamplingParams(temperature=1.0, frequency_penalty=1.0, seed=13),
        SamplingParams(temperature=1.0, min_p=0.05, seed=10),
    ]
    together = sampler(params, vocab)
    alone = [sampler([p], vocab) for p in params]
    for step in range(20):
        rows = logits.roll(step, dims=1)
        assert together.sample(rows).tokens == [
            one.sample(rows[r : r + 1]).tokens[0] for r, one in enumerate(alone)
        ]


def test_dropping_rows_leaves_the_others_streams() -> None:
    vocab = 200
    logits = random_logits(3, 4, vocab)
    params = [SamplingParams(temperature=1.0, presence_penalty=1.0, seed=s) for s in range(4)]
    whole, shrinking = sampler(params, vocab), sampler(params, vocab)
    for _ in range(3):
        assert whole.sample(logits).tokens == shrinking.sample(logits).tokens
    shrinking.keep([3, 1])
    for _ in range(3):
        tokens = whole.sample(logits).tokens
        assert shrinking.sample(logits[[3, 1]]).tokens == [tokens[3], tokens[1]]


def test_unseeded_requests_differ() -> None:
    logits = torch.zeros(2, 1000)
    params = [SamplingParams(temperature=1.0)] * 2
    runs = {tuple(sampler(params, 1000).sample(logits).tokens) for _ in range(5)}
    assert len(runs) > 1
    assert any(a != b for a, b in runs)


def test_logprobs_are_the_models_own_whatever_the_sampling() -> None:
    logits = random_logits(4, 3, 50)
    params = [
        SamplingParams(temperature=2.0, top_k=3, repetition_penalty=1.5, seed=1, logprobs=2),
        SamplingParams(logprobs=0),
        SamplingParams(),
    ]
    result = sampler(params, 50).sample(logits)
    expected = logits.log_softmax(-1)
    first, second, third = result.logprobs
    assert third is None
    assert first is not None and second is not None
    assert list(second) == [result.tokens[1]]
    assert second[result.tokens[1]].rank == 1
    assert next(iter(first)) == result.tokens[0]
    likeliest = expected[0].topk(2).indices.tolist()
    assert set(first) == {result.tokens[0], *likeliest}
    for token, found in first.items():
        assert found.logprob == pytest.approx(expected[0, token].item(), abs=1e-6)
        assert found.rank == int((expected[0] > expected[0, token]).sum()) + 1


def test_ties_are_all_kept() -> None:
    ours = sampler(
        [SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1.0, top_p=0.1)], 4
    )
    kept = ours.filter(torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2)).isfinite()
    assert kept.tolist() == [[True, True, False, False]] * 2


def test_a_flat_distribution_needs_the_whole_vocabulary() -> None:
    vocab = 5000
    logits = random_logits(6, 1, vocab, spread=1e-3)
    ours = sampler([SamplingParams(temperature=1.0, top_p=0.9)], vocab)
    assert int(ours.filter(logits).isfinite().sum()) == pytest.approx(0.9 * vocab, rel=0.01)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_refused(temperature: float) -> None:
    logits = torch.full((1, 9), float("nan"))
    one = torch.zeros(1, 9)
    one[0, 4] = float("nan")
    for wrong in (logits, one):
        with pytest.raises(PromptError, match="not numbers"):
            sampler([SamplingParams(temperature=temperature)], 9).sample(wrong)


@pytest.mark.parametrize("given", [{"logit_bias": {9: 1.0}}, {"stop_token_ids": [12]}])
def test_ids_outside_the_vocabulary_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="the vocabulary has 9"):
        sampler([SamplingParams(**given)], 9)


def test_the_ends_of_the_unit_interval_draw_a_possible_token() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, ends).tolist() == [1, 2]


def test_the_likeliest_is_what_torch_says() -> None:
    logits = random_logits(3, 50, 1000).round(decimals=1)  # with many equals
    logits[3, 7] = logits[4, 990] = float("nan")
    logits[5] = float("-inf")
    assert torch.equal(likeliest(logits), logits.argmax(dim=-1))
    assert torch.equal(likeliest(logits.double()), logits.argmax(dim=-1))
    first = [int((row == row.max()).nonzero()[0, 0]) for row in logits[:3]]
    assert likeliest(logits)[:3].tolist() == first
