"""Engines over a small model, requests of every kind, and how answers are compared."""

from __future__ import annotations

import random
from typing import Any

from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.paged.engine import Engine
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer

TEXT = ["Once upon a time there was a frog.", "def main() -> None:\n    return\n"]
FREE = SamplingParams(max_new_tokens=30, ignore_eos=True)


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
