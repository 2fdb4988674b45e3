"""Layouts that a model cannot be run on, refused before any work: which number, and the mend."""

from __future__ import annotations

import math

from fivefold.axes.cp.check import check as check_context
from fivefold.axes.pp.build import build_schedule, placement_of
from fivefold.axes.pp.split import LayerCosts, split_layers
from fivefold.axes.tp.plan import check_heads
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.model.config import ModelConfig

SPLIT_BACKWARD = ("zb-h1", "zbv", "dualpipe", "dualpipe-v")


def check_layout(layout: Layout) -> None:
    """Raise LayoutError for combinations that no model can be run on."""
    if layout.offload == "parameters" and layout.zero != 3:
        raise LayoutError(
            f"layout zero={layout.zero} keeps whole parameters where they compute, "
            "which offload=parameters takes away",
            "use zero=3, or offload=optimizer",
        )
    if layout.pp > 1:
        _check_pipeline(layout)
    ways = layout.dp_shard * layout.cp * layout.tp
    if ways % layout.ep:
        raise LayoutError(
            f"layout ep={layout.ep} does not divide the {ways} ranks of dp_shard x cp x tp, "
            "which experts are placed on",
            f"use ep={max(n for n in range(1, layout.ep) if ways % n == 0)}, or a multiple of "
            f"{layout.ep} as dp_shard",
        )


def _check_pipeline(layout: Layout) -> None:
    if layout.zero == 2 and layout.shards > 1:
        raise LayoutError(
            f"layout zero=2 with pp={layout.pp} would save nothing over zero=1: a stage's "
            "gradients are whole until its last micro-batch",
            "use zero=1 or zero=3",
        )
    sharded = layout.offload == "parameters" or (layout.zero == 3 and layout.shards > 1)
    if sharded and layout.schedule in SPLIT_BACKWARD:
        raise LayoutError(
            f"schedule={layout.schedule} postpones weight gradients, which zero=3 reduces as soon "
            "as a block's backward is done",
            "use zero=1, or schedule=1f1b or interleaved",
        )


def check_microbatches(layout: Layout, microbatches: int) -> None:
    """Raise LayoutError where the pipeline's schedule cannot take that many micro-batches."""
    if layout.pp > 1:
        build_schedule(
            layout.schedule, layout.pp, microbatches, layout.virtual if layout.virtual > 1 else None
        )


def check_model(layout: Layout, config: ModelConfig, sequence_length: int | None = None) -> None:
    """Raise LayoutError where `layout` does not divide the model or its sequences."""
    check_layout(layout)
    if layout.pp > 1:
        _check_depth(layout, config)
    if layout.tp > 1:
        check_heads(config, layout.tp)
    divides = layout.tp > 1 and layout.sequence_parallel and layout.cp == 1  # cp pads its rows
    if divides and sequence_length and sequence_length % layout.tp:
        ways = layout.tp
        raise LayoutError(
            f"sequences of {sequence_length} tokens do not divide over tp={ways}",
            f"use data.sequence_length={sequence_length // ways * ways or ways}, or "
            "layout.sequence_parallel=false",
        )
    if layout.cp > 1:
        check_context(layout, config, sequence_length or 2 * layout.cp)
        if any(rope.kind == "dynamic" for rope in config.ropes):
            raise LayoutError(
                f"rope scaling `dynamic` depends on a whole row, which cp={layout.cp} divides",
                "use cp=1, or another rope scaling",
            )
    experts = 0 if config.moe is None else config.moe.experts
    if layout.ep > 1 and (not experts or experts % layout.ep):
        raise LayoutError(
            f"layout ep={layout.ep} does not divide the model's {experts} experts",
            "use ep=1" if not experts else f"use a divisor of {experts}",
        )
    multiple = layout.cp * math.lcm(2, layout.tp)
    if experts and layout.cp > 1 and sequence_length and sequence_length % multiple:
        raise LayoutError(
            f"cp={layout.cp} would pad sequences of {sequence_length} tokens to a multiple of "
            f"{multiple}, and padding would count as load of the experts",
            f"use data.sequence_length={sequence_length // multiple * multiple or multiple}",
        )
    if experts and layout.tp > 1 and not layout.sequence_parallel:
        raise LayoutError(
            f"experts with tp={layout.tp} need sequence_parallel: each rank routes its own tokens",
            "leave layout.sequence_parallel=true",
        )


def _check_depth(layout: Layout, config: ModelConfig) -> None:
    stages = placement_of(layout).stages
    if config.num_layers < stages:
        raise LayoutError(
            f"the model's {config.num_layers} layers cannot be split into {stages} pipeline stages",
            f"use at most {config.num_layers} stages (pp times the stages of a rank)",
        )
    if layout.stage_layers is not None:
        even = LayerCosts((1.0,) * config.num_layers)
        split_layers(even, stages, layout.stage_layers)  # it refuses what does not add up
