"""Flags of torchtitan (torchtitan/config, names of its `parallelism` and `training` sections)."""

from __future__ import annotations

import math

from fivefold.core.layout import ORDER, Layout
from fivefold.plan.export.flags import Flags, Writer
from fivefold.plan.search.found import Found
from fivefold.plan.search.valid import stages_of

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def torchtitan(found: Found) -> Flags:
    """The same layout and batch; the model is chosen by its own name there."""
    out = Writer()
    layout = found.strategy.layout
    _batch(out, found)
    for name, ways in (
        ("data_parallel_replicate_degree", layout.dp_replicate),
        ("data_parallel_shard_degree", layout.dp_shard),
        ("tensor_parallel_degree", layout.tp),
        ("context_parallel_degree", layout.cp),
        ("pipeline_parallel_degree", layout.pp),
        ("expert_parallel_degree", layout.ep),
    ):
        if ways > 1 or name == "data_parallel_shard_degree":
            out.add(f"parallelism.{name}", ways)
    _context(out, layout)
    _pipeline(out, found)
    _state(out, layout)
    _recompute(out, found)
    _precision(out, found)
    if layout.order != ORDER:
        out.note(f"its mesh has one order of axes, not {'/'.join(layout.order)}")
    return out.done("torchtitan", "./run_train.sh")


def _batch(out: Writer, found: Found) -> None:
    training, strategy = found.job.training, found.strategy
    local = strategy.micro_batch
    if strategy.layout.pp > 1:
        local *= strategy.microbatches(training)
    out.add("training.seq_len", training.sequence)
    out.add("training.local_batch_size", local)
    out.add("training.global_batch_size", training.global_batch)
    if training.tokens is not None:
        step = training.global_batch * training.sequence
        out.add("training.steps", math.ceil(training.tokens / step))


def _context(out: Writer, layout: Layout) -> None:
    if layout.cp == 1:
        return
    rotate = {"ring": "alltoall", "gather": "allgather"}[layout.cp_kind]
    out.add("parallelism.context_parallel_rotate_method", rotate)
    if layout.ulysses > 1:
        out.note("it does not divide heads among context ranks: ulysses is left out")


def _pipeline(out: Writer, found: Found) -> None:
    layout = found.strategy.layout
    if layout.pp == 1:
        return
    name = SCHEDULES.get(layout.schedule)
    if name is None:
        name = "InterleavedZeroBubble" if layout.schedule == "zb-h1" else "DualPipeV"
        out.note(f"it has no {layout.schedule}: {name} is the nearest")
    out.add("parallelism.pipeline_parallel_schedule", name)
    out.add("parallelism.pipeline_parallel_microbatch_size", found.strategy.micro_batch)
    layers, stages = found.job.shape.config.num_layers, stages_of(layout)
    out.add("parallelism.pipeline_parallel_layers_per_stage", math.ceil(layers / stages))


def _state(out: Writer, layout: Layout) -> None:
    if layout.shards == 1:
        return
    if layout.zero == 3:
        out.add("parallelism.fsdp_reshard_after_forward", "always")
    else:
        out.add("parallelism.fsdp_reshard_after_forward", "never")
        out.note(
            f"zero={layout.zero} is its FSDP without resharding after forward: gradients are "
            "divided, too"
        )
    if layout.offload != "none":
        out.add("training.enable_cpu_offload")


def _recompute(out: Writer, found: Found) -> None:
    mode = found.strategy.recompute
    out.add("activation_checkpoint.mode", mode)
    if mode == "selective":
        out.add("activation_checkpoint.selective_ac_option", "op")


def _precision(out: Writer, found: Found) -> None:
    form = found.job.training.compute
    if form == "fp32":
        out.add("training.mixed_precision_param", "float32")
    elif form == "fp16":
        out.note("it trains in bfloat16 or float32, not in float16")
    else:
        out.add("training.mixed_precision_param", "bfloat16")
    if form == "fp8":
        out.add("model.converters", "float8")
    elif form == "mxfp8":
        out.add("model.converters", "mx")
