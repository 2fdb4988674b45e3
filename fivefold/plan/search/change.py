"""Something does not fit: by how much, and the smallest change with which it would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.core.errors import LayoutError, PlanError
from fivefold.core.layout import Layout
from fivefold.observe import format as as_text
from fivefold.plan.hardware.device import Device
from fivefold.plan.search.found import Found, judge, say
from fivefold.plan.search.job import Estimators, Job
from fivefold.plan.search.lean import leanest
from fivefold.plan.search.space import RECOMPUTE
from fivefold.plan.search.valid import check, divisors
from fivefold.plan.workload import Strategy

MOST_TIMES = 4096  # as many nodes are tried


@dataclass(frozen=True)
class Change:
    """What to change, in words, and what comes of it."""

    words: str
    found: Found


def change_of(found: Found, estimators: Estimators) -> Change | None:
    """The fastest of the changes of one setting with which a strategy fits, cheapest kind first."""
    job = found.job
    for kind in _changes(found.strategy):
        fitting = []
        for words, strategy in kind:
            try:
                check(job, strategy)
            except LayoutError:
                continue
            memory = estimators.ledger(job.shape, job.training, strategy, job.software)
            if max(each.total for each in memory) <= job.cluster.device.memory:
                fitting.append(Change(words, judge(job, strategy, estimators)))
        if fitting:
            return min(fitting, key=lambda each: each.found.seconds)
    return None


def _changes(strategy: Strategy) -> Iterator[list[tuple[str, Strategy]]]:
    """Changes of one setting, the least deep first."""
    layout = strategy.layout
    modes = RECOMPUTE[RECOMPUTE.index(strategy.recompute) + 1 :]
    yield [(f"recompute={mode}", replace(strategy, recompute=mode)) for mode in modes] + [
        (f"micro_batch={size}", replace(strategy, micro_batch=size))
        for size in divisors(strategy.micro_batch)[:-1]
    ]
    zeros = [z for z in (2, 3) if z > layout.zero and layout.shards > 1]
    yield [_with(strategy, f"zero={zero}", zero=zero) for zero in zeros] + [
        _with(
            strategy, f"dp_shard={size}", dp_shard=size, dp_replicate=layout.dp // size, zero=zero
        )
        for size in divisors(layout.dp)
        if size > layout.dp_shard
        for zero in ((1, 3) if layout.dp_shard == 1 else (layout.zero,))
    ]
    yield [
        _with(
            strategy, f"{axis}={2 * getattr(layout, axis)} from data ranks", **_moved(layout, axis)
        )
        for axis in ("tp", "pp", "cp")
        if layout.dp % 2 == 0
    ]
    yield [_with(strategy, "offload=optimizer", offload="optimizer")]
    yield [_with(strategy, "offload=parameters,zero=3", offload="parameters", zero=3)]


def _with(strategy: Strategy, words: str, **update: object) -> tuple[str, Strategy]:
    return words, replace(strategy, layout=strategy.layout.model_copy(update=update))


def _moved(layout: Layout, axis: str) -> dict[str, int]:
    """Twice the ways of `axis`, half the data ranks."""
    halved = "dp_shard" if layout.dp_shard % 2 == 0 else "dp_replicate"
    return {axis: 2 * getattr(layout, axis), halved: getattr(layout, halved) // 2}


def nothing_fits(job: Job, estimators: Estimators, others: tuple[Device, ...] = ()) -> PlanError:
    """An error that says what is missing, and the nearest thing that would work.

    `others`: devices that could stand in place of the job's.
    """
    least = leanest(job, estimators)
    if least is None:
        return _nothing_runs(job)
    strategy, memory = least
    missing = max(each.total for each in memory) - job.cluster.device.memory
    changes = list(_fitting(job, strategy, estimators, others))
    return PlanError(
        f"{job.shape.name} on {job.cluster.name} does not fit by {as_text.size(missing)} per GPU, "
        f"even with {say(strategy)}",
        f"smallest change that fits: {'; or '.join(changes)}" if changes else "use a smaller model",
    )


def _fitting(
    job: Job, strategy: Strategy, estimators: Estimators, others: tuple[Device, ...]
) -> Iterator[str]:
    """Changes of the least needy strategy, of the number of nodes, and of the device."""
    memory = job.cluster.device.memory
    for words, offloaded in (
        _with(strategy, "offload=optimizer", offload="optimizer", zero=1),
        _with(strategy, "offload=parameters,zero=3", offload="parameters", zero=3),
    ):
        try:
            check(job, offloaded)
        except LayoutError:
            continue
        ledgers = estimators.ledger(job.shape, job.training, offloaded, job.software)
        if max(each.total for each in ledgers) <= memory:
            host = max(each.host for each in ledgers)
            yield f"{words}, with {as_text.size(host)} of host memory for each GPU"
            break
    nodes = enough_nodes(job, estimators)
    if nodes is not None:
        yield f"{nodes} nodes instead of {job.cluster.nodes}"
    for device in sorted(others, key=lambda each: each.memory):
        cluster = replace(job.cluster, device=device)
        larger = replace(job, cluster=cluster)
        if device.memory > memory and _fits(larger, estimators):
            yield f"{job.devices} {device.name} with {as_text.size(device.memory)} each"
            break


def enough_nodes(job: Job, estimators: Estimators) -> int | None:
    """The fewest nodes on which something fits: doubled until it does, then halved back."""
    nodes = job.cluster.nodes
    while not _fits(job.on(nodes), estimators):
        nodes *= 2
        if nodes > MOST_TIMES * job.cluster.nodes:
            return None
    low, high = nodes // 2, nodes
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(job.on(middle), estimators):
            high = middle
        else:
            low = middle
    return high


def _fits(job: Job, estimators: Estimators) -> bool:
    memory = job.cluster.device.memory
    least = leanest(job, estimators, enough=memory)
    return least is not None and max(each.total for each in least[1]) <= memory


def _nothing_runs(job: Job) -> PlanError:
    """No layout divides the devices, the batch and the model."""
    batch, devices = job.training.global_batch, job.devices
    return PlanError(
        f"no layout of {job.shape.name} divides {devices} devices and a global batch of {batch}",
        f"use a batch of {max(1, round(batch / devices)) * devices}, or {_power(devices)} devices",
    )


def _power(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)
