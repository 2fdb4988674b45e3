"""The decode step that a CUDA graph records: the modules' numbers, from tensors alone."""

from __future__ import annotations

import pytest
import torch

from fivefold.engines.serve.captured import CapturedStep, record
from fivefold.engines.serve.runner import ModelRunner
from fivefold.kernels import dispatch
from fivefold.model.cache import CachedAttention, KVCache
from fivefold.model.decoder import Decoder
from tests.parity.small_models import build


def prefilled(decoder: Decoder, lengths: list[int]) -> tuple[ModelRunner, KVCache]:
    runner = ModelRunner(decoder)
    cache = runner.new_cache(len(lengths), 32)
    runner.prefill(cache, [list(range(3, 3 + n)) for n in lengths])
    return runner, cache


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("lengths", [[4], [5, 5], [2, 9, 1]])
def test_it_gives_the_bits_of_the_modules(kind: str, lengths: list[int]) -> None:
    _, decoder = build(kind)
    with dispatch.deterministic():
        _, cache = prefilled(decoder, lengths)
        _, other = prefilled(decoder, lengths)
        step = CapturedStep(decoder, cache)
        for token in (7, 11, 5):
            ids = torch.full((len(lengths),), token)
            found = step(ids, cache).clone()
            cache.advance([1] * len(lengths))
            places = other.positions(1)
            hidden = decoder(ids.unsqueeze(1), places, CachedAttention(other))
            other.advance([1] * len(lengths))
            assert torch.equal(found, decoder.logits(hidden[:, 0]))
            assert step.fits(cache)


def test_a_cache_that_moved_does_not_fit() -> None:
    _, decoder = build("llama")
    _, cache = prefilled(decoder, [4, 2])
    step = CapturedStep(decoder, cache)
    cache.reserve(100)
    assert not step.fits(cache)
    step = CapturedStep(decoder, cache)
    cache.keep([1])
    assert not step.fits(cache)


def test_on_cpus_nothing_is_recorded() -> None:
    _, decoder = build("llama")
    runner, _ = prefilled(decoder, [4])
    assert not runner.is_captured


@pytest.mark.gpu
def test_a_recorded_step_replays() -> None:
    _, decoder = build("llama")
    decoder = decoder.to("cuda", torch.bfloat16)
    with dispatch.deterministic():
        runner, cache = prefilled(decoder, [4, 2])
        _, other = prefilled(decoder, [4, 2])
        plain = CapturedStep(decoder, other)
        plain._step = plain._run
        for token in (7, 11):
            found = runner.decode(cache, [token, token]).clone()
            assert torch.equal(found, plain(torch.tensor([token, token]), other))
            other.advance([1, 1])
    assert callable(record)
