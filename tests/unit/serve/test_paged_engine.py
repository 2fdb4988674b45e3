"""The paged engine's requests: ends, aborts, forks, weights, errors, and clean idleness after all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fivefold.core.errors import PromptError
from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.generate import Generator
from fivefold.engines.serve.paged.answers import Output
from fivefold.engines.serve.paged.engine import Engine
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.scheduling.errors import QueueFullError
from fivefold.kernels import dispatch
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer
from tests.parity.small_models import build

TEXT = ["Once upon a time there was a frog.", "def main() -> None:\n    return\n"]
FREE = SamplingParams(max_new_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train_bpe(iter(TEXT), 280)


@pytest.fixture
def decoder() -> Decoder:
    _, decoder = build("llama", vocab_size=280, eos_token_id=0)
    return decoder


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    """Answers are compared between batches, to the last bit of what decides them."""
    with dispatch.deterministic():
        yield


def engine_of(decoder: Decoder, tokenizer: Tokenizer | None = None, **settings: Any) -> Engine:
    chosen = {"num_blocks": 200, "block_size": 4, "max_sequences": 6, "token_budget": 24}
    return Engine(decoder, tokenizer, EngineSettings(**(chosen | settings)))


def drain(engine: Engine) -> dict[int, list[Completion]]:
    """Answers by request, those of one request by index; the engine is left idle."""
    found: dict[int, list[Completion]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                found.setdefault(output.request, []).append(output.completion)
        engine.scheduler.invariants()
    engine.check_idle()
    return {id: sorted(some, key=lambda c: c.index) for id, some in found.items()}


def one(engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    id = engine.add_request(prompt, params)
    return drain(engine)[id][0]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 280) for _ in range(draw.randint(1, 40))] for _ in range(count)]


SETTINGS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 1}, {"repetition_penalty": 1.3}, {"logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2}, {"frequency_penalty": 1.0},
    {"temperature": 2.0, "top_k": 5, "seed": 3}, {"min_tokens": 9}, {"stop_token_ids": [5]},
    {"temperature": 1.0, "seed": 4, "n": 2}, {"logit_bias": {9: 3.0}, "stop": ["a", "th"]},
]  # fmt: skip


def mixed() -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=4 + 2 * n, ignore_eos=n % 2 == 0, **more)
        for n, more in enumerate(SETTINGS)
    ]


def essence(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason) for c in completions]


@pytest.mark.parametrize("blocks", [200, 26])
def test_the_batch_around_a_request_changes_nothing(
    decoder: Decoder, tokenizer: Tokenizer, blocks: int
) -> None:
    """With 26 blocks sequences are put back all the time."""
    asked = prompts(len(SETTINGS))
    alone = []
    for prompt, params in zip(asked, mixed(), strict=True):
        engine = engine_of(decoder, tokenizer)
        id = engine.add_request(prompt, params)
        alone.append(essence(drain(engine)[id]))
    engine = engine_of(decoder, tokenizer, num_blocks=blocks, token_budget=11)
    ids = [engine.add_request(p, q) for p, q in zip(asked, mixed(), strict=True)]
    together = drain(engine)
    assert [essence(together[id]) for id in ids] == alone
    assert (engine.state().preemptions > 0) == (blocks == 26)


def test_answers_are_the_generators(decoder: Decoder, tokenizer: Tokenizer) -> None:
    asked = prompts(len(SETTINGS), seed=1)
    params = [p for p in mixed() if p.n == 1]
    expected = Generator(decoder, tokenizer).generate(asked[: len(params)], params)
    engine = engine_of(decoder, tokenizer)
    ids = [engine.add_request(p, q) for p, q in zip(asked, params, strict=False)]
    found = drain(engine)
    for id, theirs in zip(ids, expected, strict=True):
        ours = found[id][0]
        assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert ours.prompt_tokens == theirs.prompt_tokens
        assert (ours.logprobs is None) == (theirs.logprobs is None)


def test_pieces_add_up_to_the_answer(decoder: Decoder, tokenizer: Tokenizer) -> None:
    engine = engine_of(decoder, tokenizer)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, stop="zzz", logprobs=0)
    id = engine.add_request([9, 8, 7], params)
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    last = outputs[-1].completion
    assert last is not None and all(o.completion is None for o in outputs[:-1])
    assert all(o.request == id and o.index == 0 for o in outputs)
    assert "".join(o.delta.text for o in outputs) == last.text
    assert [o.delta.token_id for o in outputs] == last.token_ids
    assert last.logprobs == [o.delta.logprobs for o in outputs]
    assert 0 < last.timings.ttft_seconds <= last.timings.seconds


def test_stop_strings_and_tokens(decoder: Decoder, tokenizer: Tokenizer) -> None:
    engine = engine_of(decoder, tokenizer)
    free = one(engine, [9, 8, 7], FREE)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    for include in (False, True):
        done = one(
            engine, [9, 8, 7],
            SamplingParams(max_new_tokens=30, ignore_eos=True, stop=stop,
                           include_stop_str_in_output=include),
        )  # fmt: skip
        end = free.text.index(stop)
        assert done.text == free.text[: end + 3 * include]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    ending = free.token_ids[6]
    first = free.token_ids.index(ending)
    stopping = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=[ending])
    done = one(engine, [9, 8, 7], stopping)
    assert done.token_ids == free.token_ids[: first + 1]
    assert done.stop_reason == ending
    late = SamplingParams(
        max_new_tokens=30, ignore_eos=True, stop_token_ids=[ending], min_tokens=first + 2
    )
    assert ending not in one(engine, [9, 8, 7], late).token_ids[: first + 2]


def test_the_models_end_is_heeded_or_ignored(tokenizer: Tokenizer) -> None:
    _, decoder = build("llama", vocab_size=280, eos_token_id=0)
    free = one(engine_of(decoder), [9, 8, 7], FREE)
    _, ending = build("llama", vocab_size=280, eos_token_id=free.token_ids[4])
    end = free.token_ids.index(free.token_ids[4])
    heeded = one(engine_of(ending), [9, 8, 7], SamplingParams(max_new_tokens=30))
    assert heeded.token_ids == free.token_ids[: end + 1]
    assert heeded.finish_reason == "stop"
    assert one(engine_of(ending), [9, 8, 7], FREE).token_ids == free.token_ids


def test_several_answers_share_their_prompt(decoder: Decoder) -> None:
    engine = engine_of(decoder, max_sequences=4, token_budget=200)
    prompt = prompts(1, seed=3)[0] * 3
    params = SamplingParams(max_new_tokens=12, temperature=1.5, seed=8, n=4, ignore_eos=True)
    id = engine.add_request(prompt, params)
    engine.step()
    shared = len(prompt) // 4 + bool(len(prompt) % 4)
    assert engine.state().running == 4
    assert engine.blocks.owned_count == shared
    found = drain(engine)[id]
    assert [c.index for c in found] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in found}) == 4
    for completion in found:  # answer i is what its own seed gives alone
        own = SamplingParams(
            max_new_tokens=12, temperature=1.5, seed=8 + completion.index, ignore_eos=True
        )
        assert one(engine_of(decoder), prompt, own).token_ids == completion.token_ids


@pytest.mark.parametrize(
    "settings", [{"max_sequences": 2}, {"num_blocks": 16}, {"prefix_cache": False}]
)
def test_forks_that_find_no_place_wait(decoder: Decoder, settings: dict[str, int]) -> None:
    prompt = prompts(1, seed=4)[0][:30]
    params = SamplingParams(max_new_tokens=20, temperature=1.5, seed=8, n=5, ignore_eos=True)
    roomy, tight = engine_of(decoder), engine_of(decoder, **settings)
    found = []
    for engine in (roomy, tight):
        id = engine.add_request(prompt, params)
        found.append([c.token_ids for c in drain(engine)[id]])
    assert found[0] == found[1]


def test_answers_of_one_token(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    params = SamplingParams(max_new_tokens=1, temperature=1.0, seed=1, n=3, ignore_eos=True)
    id = engine.add_request([5, 6, 7], params)
    assert [len(c.token_ids) for c in drain(engine)[id]] == [1, 1, 1]


def test_time_in_the_queue_ends_with_the_first_step_of_a_prompt(decoder: Decoder) -> None:
    engine = engine_of(decoder, max_sequences=1, token_budget=4)
    prompt = list(range(3, 13))  # three steps
    first, second = (
        engine.add_request(prompt, SamplingParams(max_new_tokens=3, ignore_eos=True))
        for _ in range(2)
    )
    outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    found = {o.request: o.completion.timings for o in outputs if o.completion is not None}
    assert 0 < found[first].queue_seconds < found[first].ttft_seconds
    assert found[first].ttft_seconds < found[second].queue_seconds < found[second].ttft_seconds


def test_best_of_reports_what_it_ranks_by(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    params = SamplingParams(max_new_tokens=6, temperature=1.5, seed=1, n=2, best_of=5)
    id = engine.add_request([5, 6, 7], params)
    found = drain(engine)[id]
    assert len(found) == 5
    assert all(c.logprobs is None and c.cumulative_logprob is not None for c in found)


def test_a_cached_prefix_is_used_and_changes_nothing(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    prompt = list(range(20, 57))
    cold = one(engine, prompt, FREE)
    warm = one(engine, prompt, FREE)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 36)
    assert cold.token_ids == warm.token_ids
    turn = [*prompt, *cold.token_ids, 99]
    assert one(engine, turn, FREE).cached_tokens == len(turn) // 4 * 4 - 4 * (len(turn) % 4 == 0)
    engine.add_request(prompt, FREE, tenant="other")
    (found,) = drain(engine).values()
    assert found[0].cached_tokens == 0
    assert found[0].token_ids == cold.token_ids
    off = engine_of(decoder, prefix_cache=False)
    assert [one(off, prompt, FREE).cached_tokens for _ in range(2)] == [0, 0]


def test_prompt_logprobs_compute_the_whole_prompt(decoder: Decoder) -> None:
    engine = engine_of(decoder, token_budget=7)
    prompt = list(range(20, 57))
    one(engine, prompt, FREE)
    params = SamplingParams(max_new_tokens=3, prompt_logprobs=2)
    done = one(engine, prompt, params)
    assert done.cached_tokens == 0
    assert done.prompt_logprobs is not None and len(done.prompt_logprobs) == 37
    assert done.prompt_logprobs[0] is None
    for token, found in zip(prompt[1:], done.prompt_logprobs[1:], strict=True):
        assert found is not None and next(iter(found)) == token and 2 <= len(found) <= 3
    alone = one(engine_of(decoder, token_budget=200), prompt, params)
    assert alone.prompt_logprobs == done.prompt_logprobs


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


def test_pause_and_resume(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    engine.add_request([5, 6, 7], FREE)
    engine.step()
    engine.pause()
    assert engine.step() == [] == engine.step()
    assert engine.has_work
    engine.resume()
    assert len(next(iter(drain(engine).values()))[0].token_ids) == 30


def test_new_weights_make_old_prefixes_unusable(decoder: Decoder) -> None:
    _, other = build("llama", seed=1, vocab_size=280, eos_token_id=0)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    prompt = list(range(20, 57))
    expected = one(engine_of(other), prompt, FREE)
    engine = engine_of(decoder)
    assert one(engine, prompt, FREE).token_ids != expected.token_ids
    running = engine.add_request(prompt, FREE)
    for _ in range(4):
        engine.step()
    said = list(engine._answers[running].request.token_ids)
    assert said
    engine.update_weights(state)
    assert engine.version == 1
    after = drain(engine)[running][0]
    # what was said stays; the rest is what the new weights say after it
    rest = SamplingParams(max_new_tokens=30 - len(said), ignore_eos=True)
    assert after.token_ids == [*said, *one(engine_of(other), [*prompt, *said], rest).token_ids]
    done = one(engine, prompt, FREE)
    assert done.token_ids == expected.token_ids
    engine.update_weights({"norm.weight": state["norm.weight"]}, partial=True)
    assert one(engine, prompt, FREE).cached_tokens == 0


def test_weights_that_others_changed(decoder: Decoder) -> None:
    """Training in the same process writes into them; what is packed beside follows."""
    _, other = build("llama", seed=1, vocab_size=280, eos_token_id=0)
    prompt = list(range(20, 57))
    expected = one(engine_of(other), prompt, FREE).token_ids
    engine = engine_of(decoder)
    assert one(engine, prompt, FREE).token_ids != expected
    decoder.load_state_dict(other.state_dict())
    engine.forget_cache()
    assert one(engine, prompt, FREE).token_ids == expected


def test_wrong_weights_are_refused_before_a_change(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    state = {name: torch.zeros_like(tensor) for name, tensor in decoder.state_dict().items()}
    before = decoder.norm.weight.clone()
    with pytest.raises(EngineError, match=r"no weight norm\.wait; did you mean 'norm\.weight'"):
        engine.update_weights({**state, "norm.wait": torch.zeros(1)})
    with pytest.raises(EngineError, match=r"norm\.weight is \[48\], not \[3\]"):
        engine.update_weights({**state, "norm.weight": torch.zeros(3)})
    del state["norm.weight"]
    with pytest.raises(EngineError, match=r"have no norm\.weight; .* partial=True"):
        engine.update_weights(state)
    assert torch.equal(decoder.norm.weight, before)
    assert engine.version == 0


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_requests_go_on(decoder: Decoder, level: int) -> None:
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    prompt = list(range(20, 57))
    expected = one(engine_of(decoder), prompt, FREE).token_ids
    engine = engine_of(decoder)
    id = engine.add_request(prompt, FREE)
    for _ in range(5):
        engine.step()
    engine.sleep(level)
    held = [*engine.runner.cache.keys, *engine.runner.cache.values]
    held += list(decoder.parameters()) if level == 2 else []
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    assert engine.step() == []
    with pytest.raises(EngineError, match="while sleeping"):
        engine.sleep(1)
    if level == 2:
        for wrong in (None, {"norm.weight": state["norm.weight"]}):
            with pytest.raises(EngineError, match="weights"):
                engine.wake_up(wrong)
        with pytest.raises(EngineError, match="give them to wake_up"):
            engine.update_weights(state)
        assert engine.step() == []
    engine.wake_up(state if level == 2 else None)
    assert drain(engine)[id][0].token_ids == expected
    assert one(engine, prompt, FREE).token_ids == expected


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


def test_the_context_ends_the_answer(decoder: Decoder) -> None:
    done = one(engine_of(decoder, max_context=20), [7] * 15, FREE)
    assert (len(done.token_ids), done.finish_reason) == (5, "length")


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
