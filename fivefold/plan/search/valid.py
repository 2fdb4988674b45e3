"""Strategies that would be refused, found out without building anything."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from fivefold.axes.check import SPLIT_BACKWARD, check_model
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.plan.search.job import Job
from fivefold.plan.shape import ModelShape
from fivefold.plan.workload import Strategy


def takes(schedule: str, pp: int, microbatches: int) -> bool:
    """Whether `build_schedule` would take that many micro-batches, known from its rules."""
    if microbatches < 1:
        return False
    if pp == 1:
        return True
    if schedule == "interleaved":
        return microbatches % max(1, microbatches // pp) == 0
    if schedule == "dualpipe":
        return pp % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * pp
    if schedule == "dualpipe-v":
        return microbatches >= 2 * pp
    return True


def stages_of(layout: Layout) -> int:
    """Parts that the layers are cut into."""
    if layout.pp == 1:
        return 1
    if layout.schedule == "interleaved":
        return layout.pp * max(2, layout.virtual)
    return layout.pp * (2 if layout.schedule in ("zbv", "dualpipe-v") else 1)


def divides_states(layout: Layout, pp_zero: int) -> bool:
    """Whether the layout's ZeRO stage goes with its pipeline."""
    if layout.pp == 1 or layout.shards == 1:
        return True
    return pp_zero == 1 or (pp_zero == 3 and layout.schedule not in SPLIT_BACKWARD)


def rows_suffice(job: Job, layout: Layout) -> bool:
    """Whether every rank gets a row of some parameter, where rows are what is divided."""
    if job.software.flat_shards or layout.shards == 1:
        return True
    config, ranks = job.shape.config, layout.shards
    columns = -(-config.intermediate_size // layout.tp)
    words = -(-config.vocab_size // layout.tp)
    heads = config.num_heads * config.head_dim // layout.tp
    return any(
        _filled(rows, ranks) >= ranks for rows in (words, columns, heads, config.hidden_size)
    )


def _filled(rows: int, ranks: int) -> int:
    return math.ceil(rows / math.ceil(rows / ranks))


def check(job: Job, strategy: Strategy) -> None:
    """Raise LayoutError for what could not be run on the job's cluster, with the mend."""
    layout, training = strategy.layout, job.training
    check_devices(layout, job.devices)
    refused = _refused(_as_ours(job, layout), job.shape, training.sequence)
    if refused is not None:
        raise refused
    a_pass = strategy.micro_batch * layout.dp
    if training.global_batch % a_pass:
        raise LayoutError(
            f"a global batch of {training.global_batch} is no multiple of micro-batches of "
            f"{strategy.micro_batch} on {layout.dp} data ranks",
            f"use batch={_multiple(training.global_batch, a_pass)}, or another micro_batch",
        )
    count = strategy.microbatches(training)
    if not takes(layout.schedule, layout.pp, count):
        raise LayoutError(
            f"schedule={layout.schedule} on {layout.pp} ranks does not take {count} micro-batches",
            "use schedule=1f1b, or another micro_batch",
        )
    if not rows_suffice(job, layout):
        raise LayoutError(
            f"dp_shard x cp = {layout.shards} leaves ranks without a row of any parameter",
            "use a smaller dp_shard, and dp_replicate for the other ranks",
        )


def _as_ours(job: Job, layout: Layout) -> Layout:
    """Systems with flat shards divide a stage's gradients, which fivefold does not, to no other rule."""
    if job.software.flat_shards and layout.pp > 1 and layout.zero == 2:
        return layout.model_copy(update={"zero": 1})
    return layout


@lru_cache(maxsize=4096)
def _refused(layout: Layout, shape: ModelShape, sequence: int) -> LayoutError | None:
    """What training would say of a layout: it builds the layout's schedule, which takes a while."""
    try:
        check_model(layout, shape.config, sequence)
    except LayoutError as error:
        return error
    return None


def check_devices(layout: Layout, devices: int) -> None:
    """Raise LayoutError unless the layout uses `devices`."""
    if layout.world_size == devices:
        return
    others = layout.world_size // layout.dp
    mend = "change the layout or the cluster"
    if devices % others == 0:
        mend = f"use dp_shard={devices // others}: the other axes take {others}"
    raise LayoutError(
        f"layout {layout} has {layout.world_size} ranks, the cluster {devices} devices", mend
    )


def divisors(number: int) -> tuple[int, ...]:
    """All of them, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return (*small, *(number // n for n in reversed(small) if n * n != number))


def largest(numbers: Iterable[int], limit: int) -> int:
    """The largest up to `limit`; 1 if there is none."""
    return max((n for n in numbers if n <= limit), default=1)


def _multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of
