"""The paged engine when requests are refused, aborted or fail: no block is lost, others go on."""

from __future__ import annotations

import random

import pytest
import torch
from engine_cases import FREE, drain, engine_of, essence, mixed, one, prompts

from fivefold.core.errors import PromptError
from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.scheduling.errors import QueueFullError
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer


def test_an_abort_frees_blocks_at_once(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    keep = engine.add_request([5, 6, 7], FREE)
    gone = engine.add_request(list(range(40, 70)), FREE)
    several = engine.add_request([8, 9], SamplingParams(max_new_tokens=30, n=3, temperature=1.0))
    for _ in range(6):
        engine.step()
    before = engine.blocks.owned_count
    (output,) = engine.abort(gone)
    assert engine.blocks.owned_count < before
    assert output.delta.finish_reason == "abort"
    assert output.completion is not None and output.completion.finish_reason == "abort"
    assert len(output.completion.token_ids) > 0
    assert [o.index for o in engine.abort(several)] == [0, 1, 2]
    assert engine.abort(gone) == [] == engine.abort(999)
    found = drain(engine)
    assert list(found) == [keep]
    assert found[keep][0].token_ids == one(engine_of(decoder), [5, 6, 7], FREE).token_ids
    engine.add_request([5, 6, 7], FREE)  # before it ran
    engine.abort_all()
    engine.check_idle()


def test_what_cannot_run_is_refused(decoder: Decoder) -> None:
    engine = engine_of(decoder, num_blocks=10, queue_limit=2)
    for prompt, params, words in [
        ([7] * 128, FREE, "128 tokens, but the model's context is 128"),
        ([7] * 30, FREE, "30 tokens with 30 to produce needs 15 blocks of 4, but the cache has 10"),
        ([280], FREE, "token 280, but the vocabulary has 280"),
        ("text", FREE, "needs a tokenizer"),
        ([7], SamplingParams(stop="x"), "stop strings need a tokenizer"),
        ([7], SamplingParams(logit_bias={500: 1.0}), "logit_bias names token 500"),
    ]:
        with pytest.raises(PromptError) as caught:
            engine.add_request(prompt, params)
        assert words in str(caught.value)
        with pytest.raises(PromptError):
            engine.check_request(prompt, params)
    engine.check_idle()
    engine.add_request([7], FREE)
    engine.add_request([7], FREE)
    with pytest.raises(QueueFullError):
        engine.add_request([7], FREE)
    drain(engine)
    with pytest.raises(PromptError, match="context is 20"):
        engine_of(decoder, max_context=20).add_request([7] * 20, FREE)


def test_weights_that_are_not_numbers_end_their_requests(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    with torch.no_grad():
        decoder.embedding.weight[9] = float("nan")
    engine.add_request([5, 9, 7], SamplingParams(max_new_tokens=30, temperature=1.0, n=2))
    (found,) = drain(engine).values()
    assert {c.finish_reason for c in found} == {"error"}
    assert "not numbers (NaN)" in str(found[0].stop_reason)


@pytest.mark.parametrize("where", ["runner", "sampler"])
def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = engine_of(decoder)
    engine.add_request([5, 6, 7], FREE)
    engine.add_request([5, 6], SamplingParams(max_new_tokens=30, temperature=1.0, n=2))

    def fail(*_: object) -> None:
        raise RuntimeError("out of\nmemory")

    with monkeypatch.context() as patch:
        if where == "runner":
            patch.setattr(engine.runner, "hidden", fail)
        else:
            patch.setattr(engine.sampler, "sample", fail)
        outputs = engine.step()
    assert {o.delta.finish_reason for o in outputs} == {"error"}
    assert {o.completion and o.completion.stop_reason for o in outputs} == {
        "RuntimeError: out of memory"
    }
    assert isinstance(engine.last_error, RuntimeError)
    engine.check_idle()
    assert one(engine, [5, 6, 7], FREE).finish_reason == "length"


@pytest.mark.parametrize("seed", range(3))
def test_random_streams_of_requests_and_aborts(
    decoder: Decoder, tokenizer: Tokenizer, seed: int
) -> None:
    """Every answer that survives equals its answer alone; nothing is left behind."""
    draw = random.Random(seed)
    engine = engine_of(
        decoder, tokenizer, num_blocks=draw.choice([25, 60]), block_size=draw.choice([3, 8]),
        max_sequences=draw.randint(1, 7), token_budget=draw.randint(7, 40),
    )  # fmt: skip
    asked: dict[int, tuple[list[int], SamplingParams]] = {}
    found: dict[int, list[Completion]] = {}
    pool, arriving = prompts(5, seed), 25
    while arriving or engine.has_work:
        if arriving and draw.random() < 0.3:
            arriving -= 1
            prompt = (draw.choice(pool) + draw.choice(pool))[: draw.randint(1, 40)]
            params = draw.choice(mixed())
            id = engine.add_request(prompt, params, priority=draw.randint(-2, 2))
            asked[id] = prompt, params
        if asked and draw.random() < 0.03:
            engine.abort(draw.choice(list(asked)))
        for output in engine.step():
            if output.completion is not None:
                found.setdefault(output.request, []).append(output.completion)
        engine.scheduler.invariants()
    engine.check_idle()
    assert len(found) > 10
    for id, completions in found.items():
        prompt, params = asked[id]
        alone = engine_of(decoder, tokenizer)
        same = alone.add_request(prompt, params)
        expected = {c.index: c for c in drain(alone)[same]}
        for completion in completions:
            assert essence([completion]) == essence([expected[completion.index]])
