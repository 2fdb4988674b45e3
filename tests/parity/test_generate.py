"""Whole answers, equal to transformers': greedy, fp32, one prompt at a time there, batches here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.engines.serve.generate import Generator
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.weights.open import load_decoder, load_tokenizer, open_source
from tests.parity.small_models import KINDS, build, continuation

STEPS = 24


def random_prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=rng).tolist()
    return [torch.randint(3, 199, (n,), generator=rng).tolist() for n in lengths]


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "llama-dynamic"])
def test_ragged_batch_equals_transformers_one_by_one(kind: str) -> None:
    theirs, ours = build(kind, seed=3)
    prompts = random_prompts(5, 6, 30)
    answers = Generator(ours, None).generate(prompts, SamplingParams(max_new_tokens=STEPS))
    assert [a.token_ids for a in answers] == [
        continuation(theirs, p, max_new_tokens=STEPS) for p in prompts
    ]


def test_rope_that_depends_on_the_length_runs_through_the_modules() -> None:
    theirs, ours = build("llama-dynamic", seed=3)
    generator = Generator(ours, None)
    assert generator.runner.lowered is None
    prompt = random_prompts(5, 1, 30)[0]
    answer = generator.generate([prompt], SamplingParams(max_new_tokens=STEPS))[0]
    assert answer.token_ids == continuation(theirs, prompt, max_new_tokens=STEPS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours_given", "theirs_given"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"min_tokens": 20}, {"min_new_tokens": 20}),
        ({"logit_bias": {7: -100.0, 2: 4.0}}, {"sequence_bias": [[[7], -100.0], [[2], 4.0]]}),
    ],
)
def test_settings_act_as_in_transformers(
    seed: int, ours_given: dict[str, Any], theirs_given: dict[str, Any]
) -> None:
    theirs, ours = build("llama", seed=seed)
    prompts = random_prompts(seed, 4, 12)
    params = SamplingParams(max_new_tokens=STEPS, **ours_given)
    answers = Generator(ours, None).generate(prompts, params)
    assert [a.token_ids for a in answers] == [
        continuation(theirs, p, max_new_tokens=STEPS, **theirs_given) for p in prompts
    ]


def test_end_of_sequence_ends_the_answer_as_in_transformers() -> None:
    theirs, ours = build("llama", seed=1)
    prompts = random_prompts(2, 8, 10)
    full = Generator(ours, None).generate(
        prompts, SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    )
    ending = full[0].token_ids[9]  # make a token that does occur the end
    params = SamplingParams(max_new_tokens=STEPS, stop_token_ids=[ending])
    answers = Generator(ours, None).generate(prompts, params)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = continuation(theirs, prompt, max_new_tokens=STEPS, eos_token_id=[2, ending])
        assert answer.token_ids == expected
        assert (answer.finish_reason == "stop") == (expected[-1] in (2, ending))
    assert answers[0].stop_reason == ending


@pytest.fixture(scope="module")
def stories(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trained 260K-parameter model: ours, and the same in transformers."""
    from transformers import AutoModelForCausalLM

    from fivefold.weights.save import save_huggingface

    source = open_source(shared_data / "stories260K" / "stories260K.bin")
    decoder = load_decoder(source.path)
    folder = tmp_path_factory.mktemp("stories")
    save_huggingface(folder, decoder, decoder.config, source.tokenizer())
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return theirs, Generator(decoder, source.tokenizer())


STORIES = [
    "Once upon a time",
    "Lily and Tom went to the park. They saw",
    "The dog",
    "One day, a little girl named Sue found a big red ball in the garden. She wanted to",
    "",
]


def test_stories_batch_equals_one_by_one_and_transformers(stories: Any) -> None:
    theirs, generator = stories
    params = SamplingParams(max_new_tokens=60)
    batch = generator.generate(STORIES, params)
    for text, answer in zip(STORIES, batch, strict=True):
        alone = generator.generate([text], params)[0]
        assert answer.token_ids == alone.token_ids
        assert answer.text == alone.text
        prompt = generator.tokenizer.encode(text)
        assert answer.token_ids == continuation(theirs, prompt, max_new_tokens=60)
        together = generator.tokenizer.decode([*prompt, *answer.token_ids])
        assert generator.tokenizer.decode(prompt) + answer.text == together


def test_stories_logprobs_equal_transformers(stories: Any) -> None:
    theirs, generator = stories
    answer = generator.generate([STORIES[0]], SamplingParams(max_new_tokens=30, logprobs=3))[0]
    prompt = generator.tokenizer.encode(STORIES[0])
    with torch.no_grad():
        logits = theirs(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
    assert answer.logprobs is not None
    for step, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        assert next(iter(found)) == token
        for other, value in found.items():
            assert value.logprob == pytest.approx(expected[step, other].item(), abs=1e-4)


def test_stories_stream_is_the_completion_in_pieces(stories: Any) -> None:
    _, generator = stories
    params = SamplingParams(max_new_tokens=80, temperature=0.9, seed=4, stop=["playing", ". The"])
    whole = generator.generate([STORIES[3]], params)[0]
    deltas = list(generator.stream(STORIES[3], params))
    assert "".join(d.text for d in deltas) == whole.text
    assert [d.token_id for d in deltas] == whole.token_ids
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.finish_reason
    assert not any(stop in whole.text for stop in params.stops)


def test_smollm2_equals_transformers() -> None:
    """The real model, through the chat template, in fp32."""
    from transformers import AutoModelForCausalLM

    from fivefold.core.errors import MissingExtraError

    try:
        source = open_source("smollm2")
    except MissingExtraError as error:
        pytest.skip(str(error))
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer.chat is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(tokenizer.chat.render(question), add_special=False)
    answer = Generator(load_decoder("smollm2"), tokenizer).generate(
        [prompt], SamplingParams(max_new_tokens=16)
    )[0]
    theirs = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    assert answer.token_ids == continuation(theirs, prompt, max_new_tokens=16)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
