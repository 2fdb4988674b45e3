"""TTFT and TPOT against the number of answers at once, without queues: a roofline's view."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.batch import Batch
from fivefold.plan.serving.capacity import room
from fivefold.plan.serving.step import model, prefill
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.shape import ModelShape


@dataclass(frozen=True)
class Point:
    """An engine that always has `batch` answers in the making. Seconds; rates of the engine."""

    batch: int
    step: float
    """Of a step without prompts."""
    ttft: float
    """Half a step until the prompt's turn comes, and reading it."""
    tpot: float
    """With the prompts read in between, as many as answers end."""
    tokens_per_second: float
    requests_per_second: float


def point(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster,
    batch: int, input_tokens: int, output_tokens: int, cached: int = 0,
) -> Point:  # fmt: skip
    """The steady state of `batch` answers, each replaced by the next when it ends."""
    found = model(shape, strategy, cluster)
    context = input_tokens + output_tokens / 2
    step = found.seconds(Batch(rows=batch, context=batch * context, sampled=batch))
    read = prefill(shape, strategy, cluster, input_tokens, cached=cached)
    beside = max(0.0, read - found.seconds(Batch(rows=1, context=context, sampled=1)))
    gaps = max(1, output_tokens - 1)
    tpot = step + (batch - 1) * beside / gaps
    ttft = strategy.system.front + step / 2 + read
    life = ttft + gaps * tpot
    return Point(batch, step, ttft, tpot, batch * output_tokens / life, batch / life)


def most_at_once(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, context: float
) -> int:
    """Answers at once that both the cache and `max_sequences` allow."""
    held = room(shape, strategy, cluster).sequences(context)
    return max(1, min(strategy.max_sequences, int(held)))


def curve(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster,
    input_tokens: int, output_tokens: int, cached: int = 0,
) -> list[Point]:  # fmt: skip
    """Points at powers of two up to what fits, and that last one."""
    most = most_at_once(shape, strategy, cluster, input_tokens + output_tokens)
    batches = [1]
    while batches[-1] * 2 < most:
        batches.append(batches[-1] * 2)
    if batches[-1] != most:
        batches.append(most)
    return [
        point(shape, strategy, cluster, batch, input_tokens, output_tokens, cached)
        for batch in batches
    ]


def best_within(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster,
    input_tokens: int, output_tokens: int, tpot: float | None, cached: int = 0,
) -> Point | None:  # fmt: skip
    """The point of most requests a second whose TPOT is within the limit; None where none is."""
    low, high = 1, most_at_once(shape, strategy, cluster, input_tokens + output_tokens)
    found = point(shape, strategy, cluster, low, input_tokens, output_tokens, cached)
    if tpot is not None and found.tpot > tpot:
        return None
    while low < high:  # TPOT grows with the batch
        middle = (low + high + 1) // 2
        trial = point(shape, strategy, cluster, middle, input_tokens, output_tokens, cached)
        if tpot is None or trial.tpot <= tpot:
            low, found = middle, trial
        else:
            high = middle - 1
    return found
