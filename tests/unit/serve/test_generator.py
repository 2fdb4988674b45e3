"""Batches, caches, ends and errors of generation, on small random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fivefold.core.errors import PromptError
from fivefold.engines.serve import runner as runner_module
from fivefold.engines.serve.generate import Generator
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.session import Session
from fivefold.text.tokenizer import Tokenizer
from tests.parity.small_models import build

TEXT = ["Once upon a time there was a frog.", "def main() -> None:\n    return\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train_bpe(iter(TEXT), 280)


@pytest.fixture(scope="module")
def generator(tokenizer: Tokenizer) -> Generator:
    _, decoder = build("llama", vocab_size=280, eos_token_id=0)
    return Generator(decoder, tokenizer)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=rng).tolist()
    return [torch.randint(3, 280, (n,), generator=rng).tolist() for n in lengths]


def test_groups_rows_that_end_early_and_mixed_settings_change_nothing(generator: Generator) -> None:
    asked = prompts(9)
    settings = [
        SamplingParams(max_new_tokens=4 + 3 * n, ignore_eos=n % 2 == 0, **more)
        for n, more in enumerate(
            [
                {}, {"temperature": 1.0, "seed": 1}, {"repetition_penalty": 1.3},
                {"temperature": 0.8, "top_p": 0.9, "seed": 2}, {"logprobs": 2},
                {"frequency_penalty": 1.0}, {"temperature": 2.0, "top_k": 5, "seed": 3},
                {"min_tokens": 9}, {"stop_token_ids": [5]},
            ]
        )
    ]  # fmt: skip
    alone = [generator.generate([p], s)[0] for p, s in zip(asked, settings, strict=True)]
    together = generator.generate(asked, settings)
    generator.max_batch = 4
    grouped = generator.generate(asked, settings)
    generator.max_batch = 32
    for one, two, three in zip(alone, together, grouped, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        assert one.text == two.text == three.text
        assert one.finish_reason == two.finish_reason == three.finish_reason
        assert one.prompt_tokens == two.prompt_tokens


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_a_prompt_read_in_pieces_gives_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decoder = build(kind)
    asked = [[t % 196 + 3 for t in p] for p in prompts(5)]
    params = SamplingParams(max_new_tokens=12)
    whole = Generator(decoder, None).generate(asked, params)
    monkeypatch.setattr(runner_module, "PREFILL_TOKENS", 35)  # 7 tokens of each row at a time
    pieces = Generator(decoder, None).generate(asked, params)
    assert [c.token_ids for c in pieces] == [c.token_ids for c in whole]


def test_the_cache_grows_with_the_answer(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    expected = generator.generate(prompts(3), params)
    for module in ("generate", "runner"):
        monkeypatch.setattr(f"fivefold.engines.serve.{module}.CACHE_STEP", 2)
    assert [c.token_ids for c in generator.generate(prompts(3), params)] == [
        c.token_ids for c in expected
    ]


def test_the_context_ends_the_answer(generator: Generator) -> None:
    """128 positions: a prompt of 120 leaves room for 8 tokens."""
    prompt = [7] * 120
    done = generator.generate([prompt], SamplingParams(max_new_tokens=50, ignore_eos=True))[0]
    assert len(done.token_ids) == 8
    assert done.finish_reason == "length"
    with pytest.raises(PromptError, match="128 tokens, but the model's context is 128"):
        generator.generate([[7], [7] * 128], SamplingParams())
    with pytest.raises(PromptError, match="300 tokens"):
        generator.stream([7] * 300, SamplingParams())
    with pytest.raises(PromptError, match="stop_token_ids"):
        generator.stream([7], SamplingParams(stop_token_ids=[999]))


def test_an_empty_prompt_starts_from_the_beginning_token(tokenizer: Tokenizer) -> None:
    _, decoder = build("llama", vocab_size=280, bos_token_id=1)
    with_beginning = Generator(decoder, tokenizer)
    params = SamplingParams(max_new_tokens=5)
    assert (
        with_beginning.generate([""], params)[0].token_ids
        == with_beginning.generate([[1]], params)[0].token_ids
    )
    _, without = build("llama", vocab_size=280, bos_token_id=None)
    with pytest.raises(PromptError, match="no beginning-of-sequence"):
        Generator(without, tokenizer).generate([""], params)


@pytest.mark.parametrize(
    ("asked", "params", "words"),
    [
        ([[280]], SamplingParams(), "token 280, but the vocabulary has 280"),
        ([[-1]], SamplingParams(), "token -1"),
        ([[1], [2]], [SamplingParams()], "2 prompts, but 1 sampling"),
        ([[1]], SamplingParams(stop_token_ids=[999]), "stop_token_ids names token 999"),
        ([[1]], SamplingParams(logit_bias={500: 1.0}), "logit_bias names token 500"),
    ],
)
def test_what_cannot_run_is_refused(
    generator: Generator, asked: Any, params: Any, words: str
) -> None:
    with pytest.raises(PromptError) as caught:
        generator.generate(asked, params)
    assert words in str(caught.value)


def test_text_needs_a_tokenizer() -> None:
    _, decoder = build("llama")
    bare = Generator(decoder, None)
    with pytest.raises(PromptError, match="needs a tokenizer"):
        bare.generate(["text"], SamplingParams())
    with pytest.raises(PromptError, match="stop strings need a tokenizer"):
        bare.generate([[5]], SamplingParams(stop="x"))


def test_no_prompts_give_no_completions(generator: Generator) -> None:
    assert generator.generate([], SamplingParams()) == []


def test_stop_strings_cut_the_text_and_end_the_request(generator: Generator) -> None:
    free = generator.generate([[9, 8, 7]], SamplingParams(max_new_tokens=30, ignore_eos=True))[0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    for include in (False, True):
        params = SamplingParams(
            max_new_tokens=30, ignore_eos=True, stop=stop, include_stop_str_in_output=include
        )
        done = generator.generate([[9, 8, 7]], params)[0]
        end = free.text.index(stop)
        assert done.text == free.text[: end + 3 * include]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert len(done.token_ids) < 30
        assert done.token_ids == free.token_ids[: len(done.token_ids)]


def test_an_ending_token_stays_in_the_ids_and_out_of_the_text(generator: Generator) -> None:
    free = generator.generate([[9, 8, 7]], SamplingParams(max_new_tokens=30, ignore_eos=True))[0]
    ending = free.token_ids[6]
    first = free.token_ids.index(ending)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=[ending])
    done = generator.generate([[9, 8, 7]], params)[0]
    assert done.token_ids == free.token_ids[: first + 1]
    assert done.stop_reason == ending
    assert generator.tokenizer is not None
    assert done.text == generator.tokenizer.decode(done.token_ids[:-1])


def test_timings_add_up(generator: Generator) -> None:
    done = generator.generate([[5, 6]], SamplingParams(max_new_tokens=9, ignore_eos=True))[0]
    times = done.timings
    assert 0 < times.ttft_seconds <= times.seconds
    assert times.completion_tokens == 9
    assert times.tokens_per_second == pytest.approx(8 / (times.seconds - times.ttft_seconds))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_session_answers_as_if_it_read_everything_anew(kind: str) -> None:
    _, decoder = build(kind)
    generator = Generator(decoder, None)
    session = Session(generator)
    params = SamplingParams(max_new_tokens=7)
    seen: list[int] = [5, 9, 11]
    for turn in range(4):
        deltas = list(session.stream(seen, params))
        answer = [d.token_id for d in deltas]
        assert answer == generator.generate([seen], params)[0].token_ids
        seen = [*seen, *answer, 20 + turn, 31, 17]
        assert session.held()[: len(seen) - 4] == seen[:-4]


def test_a_session_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    _, decoder = build("llama")
    generator = Generator(decoder, None)
    session = Session(generator)
    read: list[int] = []
    prefill = generator.runner.prefill
    monkeypatch.setattr(
        generator.runner, "prefill", lambda c, p: (read.append(len(p[0])), prefill(c, p))[1]
    )
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    first = [d.token_id for d in session.stream([3, 4, 5, 6], params)]
    list(session.stream([3, 4, 5, 6, *first, 50, 51], params))  # all but the last token is held
    list(session.stream([3, 4, 99], params))
    assert [d.token_id for d in session.stream([3, 4, 99], params)] == [
        d.token_id for d in generator.stream([3, 4, 99], params)
    ]  # the end of a prompt is computed again, even when all of it is held
    assert read == [4, 3, 1, 1, 3]


def test_an_abandoned_answer_leaves_the_session_usable() -> None:
    _, decoder = build("llama")
    generator = Generator(decoder, None)
    session = Session(generator)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    stream = session.stream([3, 4, 5], params)
    part = [next(stream).token_id for _ in range(6)]
    prompt = [3, 4, 5, *part, 60]
    again = [d.token_id for d in session.stream(prompt, params)]
    assert again == generator.generate([prompt], params)[0].token_ids
