"""Prometheus metrics, with the names of vLLM's dashboards and `fivefold:` in front."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fivefold.engines.serve.completion import Timings
from fivefold.engines.serve.paged.state import EngineState
from fivefold.engines.serve.server.pool import EnginePool

PREFIX = "fivefold:"
RATE_SECONDS = 5
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20)


class Metrics:
    """What the server counts itself; what engines count is asked of them at each reading."""

    def __init__(self, model: str, pool: EnginePool) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model, pool))
        self.requests_total = 0
        self._model = model
        self._rate = TokenRate()
        self._first = self._histogram("time_to_first_token_seconds", "First token.", _FIRST)
        self._next = self._histogram("inter_token_latency_seconds", "Between tokens.", _NEXT)
        self._mean = self._histogram(
            "request_time_per_output_token_seconds", "Mean between a request's tokens.", _NEXT
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Whole request.", _WHOLE)
        self._queued = self._histogram("request_queue_time_seconds", "Waiting.", _WHOLE)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the end of waiting to the first token.", _WHOLE
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _WHOLE
        )
        self._read = self._histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._written = self._histogram("request_generation_tokens", "Tokens of answers.", _TOKENS)
        self._asked = self._histogram("request_params_n", "Answers asked for.", _COUNTS)
        self._most = self._histogram("request_params_max_tokens", "Tokens allowed.", _TOKENS)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("generation_tokens", "Tokens produced.")
        self._ended = Counter(
            f"{PREFIX}request_success", "Answers, by how they ended.",
            ["model_name", "finished_reason"], registry=self.registry,
        )  # fmt: skip

    def accepted(self, prompt_tokens: int, answers: int, max_tokens: int) -> None:
        """A prompt is on its way."""
        self.requests_total += 1
        self._prompt_tokens.inc(prompt_tokens)
        self._read.observe(prompt_tokens)
        self._asked.observe(answers)
        self._most.observe(max_tokens)

    def token(self, seconds: float, is_first: bool) -> None:
        """A token, so long after the one before it or after the request came."""
        self._generated.inc()
        self._rate.count()
        (self._first if is_first else self._next).observe(seconds)

    def finished(
        self, reason: str, tokens: int, seconds: float, decoding: float, engine: Timings
    ) -> None:
        """An answer's end, `seconds` after the request came; `decoding` after its first token.

        `engine`: how the engine, which counts from when it took the request, spent the time.
        """
        self._ended.labels(self._model, reason).inc()
        self._written.observe(tokens)
        self._whole.observe(seconds)
        if tokens:
            self._queued.observe(engine.queue_seconds)
            self._prefill.observe(engine.ttft_seconds - engine.queue_seconds)
            self._decode.observe(engine.seconds - engine.ttft_seconds)
        if tokens > 1:
            self._mean.observe(decoding / (tokens - 1))

    def cut_short(self, reason: str, answers: int) -> None:
        """Answers whose end nobody waits for."""
        self._ended.labels(self._model, reason).inc(answers)

    @property
    def tokens_per_second(self) -> float:
        """Tokens produced lately."""
        return self._rate.per_second

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"{PREFIX}{name}", what, ["model_name"], buckets=buckets, registry=self.registry
        ).labels(self._model)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"{PREFIX}{name}", what, ["model_name"], registry=self.registry).labels(
            self._model
        )


class TokenRate:
    """Tokens of the last full `RATE_SECONDS`, second by second."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque(maxlen=RATE_SECONDS + 1)  # [second, tokens]

    def count(self) -> None:
        """One more token, now."""
        now = int(time.monotonic())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0])
        self._seconds[-1][1] += 1

    @property
    def per_second(self) -> float:
        """The mean; the second that has not ended is left out."""
        now = int(time.monotonic())
        found = [n for second, n in self._seconds if now - RATE_SECONDS <= second < now]
        return sum(found) / RATE_SECONDS


class EngineCollector(Collector):
    """Counts of each engine, read when asked."""

    def __init__(self, model: str, pool: EnginePool) -> None:
        self._model, self._pool = model, pool

    def collect(self) -> Iterator[Metric]:
        """The metrics of every engine that is up."""
        restarts = CounterMetricFamily(
            f"{PREFIX}engine_restarts", "Engine processes that had to be replaced.",
            labels=["model_name", "engine"],
        )  # fmt: skip
        for index, client in enumerate(self._pool.clients):
            restarts.add_metric([self._model, str(index)], client.restarts)
        yield restarts
        for name, what, read in _GAUGES:
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", what, labels=["model_name", "engine"])
            yield self._fill(gauge, read)
        for name, what, read in _COUNTERS:
            counter = CounterMetricFamily(f"{PREFIX}{name}", what, labels=["model_name", "engine"])
            yield self._fill(counter, read)

    def _fill(self, metric: GaugeMetricFamily | CounterMetricFamily, read: object) -> Metric:
        assert callable(read)
        for index, state in enumerate(self._pool.states()):
            if state is not None:
                metric.add_metric([self._model, str(index)], read(state))
        return metric


def _usage(state: EngineState) -> float:
    return state.blocks_owned / state.blocks


_GAUGES = (
    ("num_requests_running", "Sequences that run.", lambda s: s.running),
    ("num_requests_waiting", "Requests that wait.", lambda s: s.waiting),
    ("kv_cache_usage_perc", "Share of blocks that requests hold, 0 to 1.", _usage),
)
_COUNTERS = (
    ("num_preemptions", "Sequences put back for want of memory.", lambda s: s.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked for in the cache.", lambda s: s.tokens_asked),
    ("prefix_cache_hits", "Prompt tokens found there.", lambda s: s.tokens_hit),
    ("engine_steps", "Steps computed.", lambda s: s.steps),
)
