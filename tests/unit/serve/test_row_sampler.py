"""Requests that come and go are sampled as if each were alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.engines.serve.row_sampler import RowSampler
from fivefold.engines.serve.sampler import Sampler
from fivefold.engines.serve.sampling_params import SamplingParams

VOCABULARY = 300
ENDS = (1, 2)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 3},
    {"repetition_penalty": 1.4},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": {7: 4.0, 9: -100.0}, "logprobs": 0},
    {"min_tokens": 6, "stop_token_ids": [5]},
    {"min_tokens": 3, "temperature": 2.0, "logit_bias": {1: 50.0}},
    {"top_k": 3, "top_p": 0.5, "temperature": 1.2, "repetition_penalty": 0.8, "logprobs": 2},
]


def logits_of(request: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * request + step)
    return torch.randn(VOCABULARY, generator=generator) * 3


def alone(request: int, params: SamplingParams, prompt: list[int], steps: int) -> list[Any]:
    ours = Sampler([params], [prompt], vocab_size=VOCABULARY, end_tokens=ENDS)
    found = [ours.sample(logits_of(request, step)[None]) for step in range(steps)]
    return [(s.tokens[0], s.logprobs[0]) for s in found]


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_come_and_go(seed: int) -> None:
    draw = random.Random(seed)
    params = [SamplingParams(seed=n, **draw.choice(KINDS)) for n in range(30)]
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))] for _ in params]
    steps = [draw.randint(1, 14) for _ in params]
    sampler = RowSampler(VOCABULARY, ENDS)
    found: list[list[Any]] = [[] for _ in params]
    coming, live = list(range(len(params))), []
    while coming or live:
        while coming and draw.random() < 0.5:
            live.append(coming.pop())
            sampler.add(live[-1], params[live[-1]], prompts[live[-1]])
        if not live:
            continue
        if draw.random() < 0.3:
            draw.shuffle(live)
        batch = live[: draw.randint(1, len(live))]  # others were put back, or read their prompts
        logits = torch.stack([logits_of(n, len(found[n])) for n in batch])
        before = logits.clone()
        sampled = sampler.sample(logits, batch)
        assert torch.equal(logits, before)
        assert not sampled.broken
        for n, token, logprobs in zip(batch, sampled.tokens, sampled.logprobs, strict=True):
            found[n].append((token, logprobs))
            if len(found[n]) == steps[n]:
                sampler.remove(n)
                live.remove(n)
    assert len(sampler) == 0
    for n, results in enumerate(found):
        assert results == alone(n, params[n], prompts[n], steps[n]), params[n]


def test_nothing_is_gathered_again_while_the_rows_stay() -> None:
    sampler = RowSampler(VOCABULARY)
    for n in range(3):
        sampler.add(n, SamplingParams(temperature=1.0, seed=n, min_tokens=n), [1])
    batches = []
    for step in range(4):
        sampler.sample(torch.stack([logits_of(n, step) for n in range(3)]), [0, 1, 2])
        batches.append(sampler._batch)
    assert all(batch is batches[0] for batch in batches)
    sampler.remove(1)
    sampler.sample(torch.stack([logits_of(n, 4) for n in (0, 2)]), [0, 2])
    assert sampler._batch is not batches[0]


def test_a_slot_is_clean_when_it_is_used_again() -> None:
    sampler = RowSampler(5)
    params = SamplingParams(presence_penalty=2.0, repetition_penalty=1.5)
    for n in range(40):
        sampler.add(n, params, [0])
        logits = torch.tensor([[1.0, 0.9, 0.0, 0.0, 0.0]])
        assert sampler.sample(logits, [n]).tokens == [1]
        assert sampler.sample(logits, [n]).tokens != [1]
        sampler.remove(n)
    assert sampler.histories._seen.shape[0] <= 4


def test_answers_of_one_request_draw_apart_and_reproduce() -> None:
    def run(index: int) -> list[int]:
        sampler = RowSampler(VOCABULARY)
        sampler.add(0, SamplingParams(temperature=2.0, seed=11), [1], index)
        return [sampler.sample(logits_of(0, s)[None], [0]).tokens[0] for s in range(12)]

    assert run(0) == run(0) != run(1)
    assert run(2) == run(2) != run(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_nan_are_named_and_others_go_on(temperature: float) -> None:
    sampler = RowSampler(VOCABULARY)
    params = SamplingParams(temperature=temperature, seed=1, presence_penalty=1.0)
    for n in range(3):
        sampler.add(n, params, [1])
    logits = torch.stack([logits_of(n, 0) for n in range(3)])
    logits[1, 17] = float("nan")
    sampled = sampler.sample(logits, [0, 1, 2])
    assert sampled.broken.keys() == {1}
    for n in (0, 2):
        assert sampled.tokens[n] == alone(n, params, [1], 1)[0][0]
