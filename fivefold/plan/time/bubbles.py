"""Bubbles of five schedules as Qi et al. 2023 (2401.10241), tables 3 to 5, report them, and as planned.

The paper runs each schedule with measured times of the three passes and says what share of the longest
rank's time is no computation. Here the passes' times are the plan's own, of a stage in the middle.
Schedules of `zero` bubble kind are measured from a rank's own first action to its last, as the paper's
optimizer does not wait for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.axes.pp.build import build_schedule
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.simulate import Costs, simulate
from fivefold.core.layout import Layout
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models.gpt import gpt
from fivefold.plan.software import MEGATRON_2022
from fivefold.plan.time.step import pieces
from fivefold.plan.time.zero_bubble import window, zb_2p, zb_h2
from fivefold.plan.workload import Strategy, Training

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-2p")
SEQUENCE = 1024


@dataclass(frozen=True)
class Model:
    """One line of the tables. `measured`: shares in the order of `SCHEDULES`."""

    name: str
    layers: int
    heads: int
    hidden: int
    ranks: int
    micro_batch: int
    microbatches: int
    measured: tuple[float, ...]

    @property
    def layers_a_rank(self) -> int:
        """The first and the last rank have one less, for embedding and head."""
        return (self.layers + 2) // self.ranks


BUBBLES = (
    Model("1.5B", 22, 24, 2304, 8, 6, 24, (0.2431, 0.1055, 0.1585, 0.1083, 0.0433)),
    Model("6.2B", 30, 32, 4096, 8, 3, 24, (0.2347, 0.0808, 0.1323, 0.0698, 0.0029)),
    Model("14.6B", 46, 40, 5120, 16, 1, 48, (0.2552, 0.1104, 0.1397, 0.0672, 0.0066)),
    Model("28.3B", 62, 48, 6144, 32, 1, 96, (0.2646, 0.1493, 0.1421, 0.0641, 0.0038)),
)


def stage(model: Model) -> Costs:
    """Seconds of a stage in the middle."""
    few = model.layers_a_rank
    layers = (few - 1, *(few,) * (model.ranks - 2), few - 1)
    layout = Layout(pp=model.ranks, stage_layers=layers)
    shape = gpt(model.name, model.layers, model.hidden, model.heads, vocabulary=50_304)
    training = Training(SEQUENCE, model.micro_batch * model.microbatches, compute="fp16")
    nodes = model.ranks // 8
    found = pieces(
        shape, training, Strategy(layout, model.micro_batch), cluster(f"{nodes}x8xA100-80GB"),
        MEGATRON_2022,
    )  # fmt: skip
    middle = found.timed[1]
    return Costs(middle.forward, middle.input, middle.weight, found.send)


def bubble(model: Model, name: str) -> float:
    """Share of the longest rank's time in which it computes nothing."""
    costs = stage(model)
    work = model.microbatches * (costs.forward + costs.input + costs.weight)
    parts = model.layers_a_rank if name == "interleaved" else 1
    each = Costs(costs.forward / parts, costs.input / parts, costs.weight / parts, costs.send)
    timeline = simulate(_schedule(model, name, costs), each)
    span = window(timeline) if name.startswith("zb") else timeline.makespan
    return (span - work) / span


def _schedule(model: Model, name: str, costs: Costs) -> Schedule:
    ranks, count = model.ranks, model.microbatches
    if name == "zb-h2":
        return zb_h2(ranks, count)
    if name == "zb-2p":
        # Korthikanti's activations of a layer, s b h (34 + 5 a s / h), of which W needs 32 s b h.
        aside = 32 / (34 + 5 * model.heads * SEQUENCE / model.hidden)
        return zb_2p([costs] * ranks, count, aside)
    virtual = model.layers_a_rank if name == "interleaved" else None
    return build_schedule(name, ranks, count, virtual)
