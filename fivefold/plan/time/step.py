"""The time of a training step: parts of the model, the pipeline over them, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.plan.communication import Group, stage_link
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.memory.depth import layers_of
from fivefold.plan.memory.flight import stages_of
from fivefold.plan.memory.place import Place, element_bytes
from fivefold.plan.shape import ModelShape
from fivefold.plan.time.block import Neighbours, Passes
from fivefold.plan.time.bubble import Part, busy, makespan, share
from fivefold.plan.time.bubble import held as held_parts
from fivefold.plan.time.cost import Cost
from fivefold.plan.time.data import Held, Traffic, Ways, gradients, held, sharded
from fivefold.plan.time.flops import hardware_flops, training_flops
from fivefold.plan.time.messages import message, waited
from fivefold.plan.time.rates import rates
from fivefold.plan.time.result import DENSE_ERROR, EXPERTS_ERROR, StepTime
from fivefold.plan.time.stage import part_passes
from fivefold.plan.time.update import update
from fivefold.plan.time.work import Kinds, kinds
from fivefold.plan.workload import Software, Strategy, Training


@dataclass(frozen=True)
class Pieces:
    """Everything that a step is put together from. One entry a part of the model."""

    passes: tuple[Passes, ...]
    holding: tuple[Held, ...]
    shards: tuple[Traffic, ...]  # ZeRO-3, of one micro-batch
    timed: tuple[Part, ...]
    microbatches: int
    send: float


def step_time(
    shape: ModelShape, training: Training, strategy: Strategy, cluster: Cluster, software: Software
) -> StepTime:
    """Of one optimizer step. Raises PlanError for a global batch that does not divide.

    The pipeline's makespan is in closed form (`bubble.py`); `simulated_step` follows the actions.
    """
    found = pieces(shape, training, strategy, cluster, software)
    layout = strategy.layout
    span = makespan(layout, found.timed, found.microbatches)
    waits = waited(layout, found.microbatches, found.send, software.blocking_sends)
    return assemble(shape, training, strategy, cluster, software, found, span, waits)


def pieces(
    shape: ModelShape, training: Training, strategy: Strategy, cluster: Cluster, software: Software
) -> Pieces:
    """Costs of every part for one micro-batch. Raises PlanError for a batch that does not divide."""
    layout = strategy.layout
    place = Place.of(shape, training, strategy, software)
    speed = rates(cluster.device, training.compute)
    near, ways = Neighbours.of(cluster, layout), Ways.of(cluster, layout)
    known: dict[Kinds, tuple[Passes, Held, Traffic, Part]] = {}
    found = []
    parts = stages_of(layout.schedule, layout.pp, layout.virtual) if layout.pp > 1 else 1
    for layers in layers_of(shape, training.sequence, parts, layout, software):
        kind = kinds(shape, layers)
        if kind not in known:
            passes = part_passes(place, speed, near, kind)
            holds = held(shape, kind, layout.tp, layout.ep)
            known[kind] = passes, holds, *_timed(ways, layout, place, passes, holds)
        found.append(known[kind])
    count = microbatches(training, strategy)
    return Pieces(
        passes=tuple(each[0] for each in found),
        holding=tuple(each[1] for each in found),
        shards=tuple(each[2] for each in found),
        timed=tuple(each[3] for each in found),
        microbatches=count,
        send=message(place, cluster, layout),
    )


def _timed(
    ways: Ways, layout: Layout, place: Place, passes: Passes, holds: Held
) -> tuple[Traffic, Part]:
    """What ZeRO-3 moves for a part and micro-batch, and the part's times with what of it is waited for."""
    forward, weight = passes.forward.seconds, passes.weight.seconds
    backward = passes.input.seconds + passes.again.seconds
    traffic = sharded(
        ways, layout, place.software, holds, forward, backward + weight, place.element
    )
    return traffic, Part(forward, backward + traffic.exposed, weight)


def microbatches(training: Training, strategy: Strategy) -> int:
    """Of one data rank. Raises PlanError where they are no whole number."""
    ways = strategy.micro_batch * strategy.layout.dp
    if training.global_batch % ways or training.global_batch < ways:
        raise PlanError(
            f"a global batch of {training.global_batch} is no multiple of {ways}, micro-batch "
            f"{strategy.micro_batch} on {strategy.layout.dp} data ranks",
            "change one of them",
        )
    return training.global_batch // ways


def assemble(
    shape: ModelShape,
    training: Training,
    strategy: Strategy,
    cluster: Cluster,
    software: Software,
    found: Pieces,
    span: float,
    waits: float,
) -> StepTime:
    """A step from the pipeline's `span` and the seconds that it `waits` for messages."""
    layout, m = strategy.layout, found.microbatches
    of = held_parts(layout, len(found.timed))
    work = busy(layout, found.timed, m)
    rank = work.index(max(work))
    times = m * share(layout)
    once, again = _sum([found.passes[i] for i in of[rank]], times)
    exposed, hidden = _communication(once + again)
    exposed["pp"] = waits
    streamed = [found.shards[i] for i in of[rank]]
    end = _end(shape, training, strategy, cluster, software, found, of)
    exposed["dp"] = end.exposed + times * sum(each.exposed for each in streamed)
    hidden["dp"] = end.hidden + times * sum(each.hidden for each in streamed)
    loaded = m * strategy.micro_batch * training.sequence * 16 / cluster.host.rate
    total = span + waits + end.exposed + end.optimizer + loaded
    tokens = float(training.global_batch * training.sequence)
    rate = tokens / total / layout.world_size
    peak = _peak(cluster, training)
    return StepTime(
        total=total,
        compute=once.kernels + once.host,
        recompute=again.kernels + again.host,
        products=once.products,
        attention=once.attention,
        elementwise=once.elementwise,
        host=once.host,
        exposed={axis: seconds for axis, seconds in exposed.items() if seconds > 0},
        hidden={axis: seconds for axis, seconds in hidden.items() if seconds > 0},
        bubble=span - max(work),
        optimizer=end.optimizer,
        data=loaded,
        microbatches=m,
        tokens_per_second=tokens / total,
        flops_per_device=rate * training_flops(shape, training.sequence),
        mfu=rate * training_flops(shape, training.sequence) / peak,
        error=DENSE_ERROR if shape.config.moe is None else EXPERTS_ERROR,
        hfu=rate * hardware_flops(shape, training.sequence, strategy.recompute) / peak,
    )


@dataclass(frozen=True)
class _End:
    """After the last backward: sums of gradients that are waited for, and the update."""

    exposed: float
    hidden: float
    optimizer: float


def _end(
    shape: ModelShape,
    training: Training,
    strategy: Strategy,
    cluster: Cluster,
    software: Software,
    found: Pieces,
    of: Sequence[Sequence[int]],
) -> _End:
    """Of the rank that takes longest for it."""
    layout, element = strategy.layout, element_bytes(training, software)
    ways, speed = (
        Ways.of(cluster, layout),
        rates(cluster.device, training.compute),
    )
    ends: dict[tuple[Held, float, float], _End] = {}
    for mine in of:
        holding = sum((found.holding[i] for i in mine), Held())
        ahead = sum(found.timed[i].forward for i in mine)
        back = sum(found.timed[i].input + found.timed[i].weight for i in mine)
        copies = _copies(shape, cluster, layout, software, mine, holding)
        if (holding, back, copies) not in ends:
            traffic = gradients(ways, layout, software, holding, ahead, back, element)
            seconds = update(cluster, layout, software, speed, ways, holding, element)
            exposed = traffic.exposed + copies
            ends[holding, back, copies] = _End(exposed, traffic.hidden, seconds)
    return max(ends.values(), key=lambda end: end.exposed + end.optimizer)


def _copies(
    shape: ModelShape,
    cluster: Cluster,
    layout: Layout,
    software: Software,
    mine: Sequence[int],
    holding: Held,
) -> float:
    """Seconds of summing gradients of what two stages have: a tied embedding, dualpipe's copies."""
    if layout.pp == 1:
        return 0.0
    link = stage_link(cluster, layout)
    pair = Group(2, 1, link, link)
    if layout.schedule == "dualpipe":
        return pair.reduce(float(holding.total) * software.gradient_bytes)
    ends = {0, stages_of(layout.schedule, layout.pp, layout.virtual) - 1}
    if not shape.config.tie_embeddings or len(ends & set(mine)) != 1:
        return 0.0
    table = shape.config.vocab_size * shape.config.hidden_size / layout.tp
    return pair.reduce(table * software.gradient_bytes)


def _sum(passes: Sequence[Passes], times: float) -> tuple[Cost, Cost]:
    """All that is needed once, and what is computed again."""
    once, again = Cost(), Cost()
    for each in passes:
        once += each.forward + each.input + each.weight
        again += each.again
    return once * times, again * times


def _communication(cost: Cost) -> tuple[dict[str, float], dict[str, float]]:
    exposed = {"tp": cost.tensor, "cp": cost.context, "ep": cost.experts}
    hidden = {"tp": cost.hidden_tensor, "cp": cost.hidden_context, "ep": cost.hidden_experts}
    return exposed, hidden


def _peak(cluster: Cluster, training: Training) -> float:
    device = cluster.device
    if training.compute != "mxfp8":
        return device.flops(training.compute)
    if "fp4" not in device.peak:  # the generations that have scales in their products have both
        raise PlanError(f"{device.name} has no products in mxfp8", "use precision=fp8 or bf16")
    return device.flops("fp8")
