"""The paged engine: what it answers is what one request alone would be answered."""

from __future__ import annotations

import pytest
from engine_cases import FREE, SETTINGS, drain, engine_of, essence, mixed, one, prompts

from fivefold.engines.serve.generate import Generator
from fivefold.engines.serve.paged.answers import Output
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer
from tests.parity.small_models import build


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


def test_the_context_ends_the_answer(decoder: Decoder) -> None:
    done = one(engine_of(decoder, max_context=20), [7] * 15, FREE)
    assert (len(done.token_ids), done.finish_reason) == (5, "length")
