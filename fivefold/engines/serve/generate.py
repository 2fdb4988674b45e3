"""Text from a decoder: batches of prompts at once, or one prompt streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from fivefold.core.errors import PromptError
from fivefold.engines.serve.completion import Completion, Delta
from fivefold.engines.serve.prepare import Preparation, Prompt
from fivefold.engines.serve.request import Request
from fivefold.engines.serve.runner import CACHE_STEP, ModelRunner
from fivefold.engines.serve.sampler import Sampler
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.model.cache import KVCache
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer


class Generator:
    """Generates with one decoder.

    `tokenizer` may be None when prompts are token ids and no text is wanted. `max_batch` prompts
    run together at most; longer lists run in groups of like length.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer | None, *, max_batch: int = 32
    ) -> None:
        self.config = decoder.config
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.runner = ModelRunner(decoder)
        self._preparation = Preparation(self.config, tokenizer)
        self.end_tokens = self._preparation.end_tokens

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Answers in the order of the prompts; `params` is one for all, or one each.

        Raises PromptError for a prompt that does not fit the context, before any work.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise PromptError(
                f"{len(prompts)} prompts, but {len(each)} sampling parameters",
                "give one for all, or one each",
            )
        requests = [self.request(p, q) for p, q in zip(prompts, each, strict=True)]
        longest_first = sorted(requests, key=lambda r: len(r.prompt), reverse=True)
        for start in range(0, len(requests), self.max_batch):
            batch = longest_first[start : start + self.max_batch]
            for _ in self.run(batch, self.runner.new_cache(len(batch), room_for(batch))):
                pass
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Delta]:
        """The answer token by token. Raises PromptError here, not at the first token."""
        request = self.request(prompt, params)
        cache = self.runner.new_cache(1, room_for([request]))
        return (deltas[0] for deltas in self.run([request], cache))

    def run(self, requests: list[Request], cache: KVCache) -> Iterator[list[Delta]]:
        """Step a batch until every request has ended; one list of deltas a step.

        Row i of `cache` is request i and may hold the beginning of its prompt already.
        """
        started = time.perf_counter()
        sampler = Sampler(
            [r.params for r in requests],
            [r.prompt for r in requests],
            vocab_size=self.config.vocab_size,
            end_tokens=self.end_tokens,
            device=self.runner.device,
        )
        logits = self.runner.prefill(
            cache, [r.prompt[held:] for r, held in zip(requests, cache.lengths, strict=True)]
        )
        while True:
            sampled = sampler.sample(logits)
            elapsed = time.perf_counter() - started
            yield [
                request.accept(token, logprobs, elapsed)
                for request, token, logprobs in zip(
                    requests, sampled.tokens, sampled.logprobs, strict=True
                )
            ]
            running = [row for row, r in enumerate(requests) if r.finish_reason is None]
            if not running:
                return
            if len(running) < len(requests):
                requests = [requests[row] for row in running]
                sampler.keep(running)
                cache.keep(running)
            logits = self.runner.decode(cache, [r.token_ids[-1] for r in requests])

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A prompt ready to run. Raises PromptError for one that this model cannot take."""
        many = params.candidates > 1 or params.prompt_logprobs is not None
        if many or params.structured_outputs is not None:
            raise PromptError(
                "n, best_of, prompt_logprobs and structured_outputs need the paged engine",
                "use fivefold.LLM",
            )
        return self._preparation.request(prompt, params)


def room_for(requests: Sequence[Request]) -> int:
    """Tokens of cache a row to begin with; it grows when answers are long."""
    return max(len(r.prompt) + min(r.limit, CACHE_STEP) for r in requests)
