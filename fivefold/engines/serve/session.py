"""A conversation that keeps its KV cache: each turn reads only what is new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivefold.engines.serve.completion import Delta
from fivefold.engines.serve.generate import Generator, room_for
from fivefold.engines.serve.request import Request
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.model.cache import KVCache


class Session:
    """Streams answers to prompts that continue one another.

    What a prompt has in common with the tokens that the cache holds is not computed again; any
    other prompt is simply read from where it differs. An answer may be abandoned half-way.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._cache: KVCache | None = None
        self._last: Request | None = None

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Delta]:
        """The answer token by token. Raises PromptError here, not at the first token."""
        request = self.generator.request(prompt, params)
        shared = self._shared(request.prompt)
        if self._cache is None:
            self._cache = self.generator.runner.new_cache(1, room_for([request]))
        self._cache.truncate([shared])
        self._cache.reserve(room_for([request]))
        self._last = request
        return (deltas[0] for deltas in self.generator.run([request], self._cache))

    def held(self) -> list[int]:
        """Token ids whose keys and values the cache holds."""
        if self._cache is None or self._last is None:
            return []
        return [*self._last.prompt, *self._last.token_ids][: self._cache.lengths[0]]

    def _shared(self, prompt: list[int]) -> int:
        """Leading tokens of the prompt that are held; never all, as its end must be computed."""
        shared = 0
        for ours, theirs in zip(self.held(), prompt[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        return shared
