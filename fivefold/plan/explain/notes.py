"""What a reader of a plan should know beside its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.observe import format as as_text
from fivefold.plan.communication import group
from fivefold.plan.explain.compare import differences, verdict
from fivefold.plan.search.answer import Answer
from fivefold.plan.search.found import Found, say

TIE = 0.05  # of a time: strategies closer than that are told apart by measuring
THIN = 0.05  # of a device's memory: less room than that is no margin


def notes(answer: Answer) -> list[str]:
    """Warnings and reasons, the most important first."""
    refused = [] if answer.refused is None else [f"your layout cannot be run: {answer.refused}"]
    return [
        *refused,
        *_parts(answer),
        *_margin(answer),
        *_tie(answer),
        *_placement(answer.winner),
        *_guess(answer),
        *answer.job.shape.notes,
    ]


def _parts(answer: Answer) -> Iterator[str]:
    cluster = answer.job.cluster
    if ":" in cluster.device.name and cluster.devices > 1:
        yield (
            f"{cluster.device.name} is a part of a device: NCCL does not join two parts of one, so "
            "each must be of another"
        )


def _margin(answer: Answer) -> Iterator[str]:
    winner = answer.winner
    memory = winner.job.cluster.device.memory
    if winner.room >= THIN * memory:
        return
    text = (
        f"thin margin: {as_text.size(winner.room)} ({winner.room / memory:.1%}) of memory is free"
    )
    roomy = [
        each
        for each in answer.front
        if each.room >= 2 * THIN * memory and each.job.devices == winner.job.devices
    ]
    if roomy:
        other = min(roomy, key=lambda each: each.seconds)
        text += (
            f"; {say(other.strategy)} leaves {as_text.size(other.room)} and takes "
            f"{other.seconds / winner.seconds - 1:+.1%}"
        )
    yield text


def _tie(answer: Answer) -> Iterator[str]:
    close = [
        each for each in answer.ranking[1:] if abs(each.seconds / answer.winner.seconds - 1) < TIE
    ]
    if close:
        yield (
            f"{len(close)} other shapes are within {TIE:.0%}, closer than the time model is to "
            "measurements: try them before choosing"
        )


def _placement(winner: Found) -> Iterator[str]:
    layout, cluster = winner.strategy.layout, winner.job.cluster
    if layout.tp > 1 and not group(cluster, layout, ("tp",)).crosses:
        inside, between = cluster.inside, cluster.between
        if cluster.devices > cluster.domain:
            yield (
                f"tp={layout.tp} stays in a domain of {cluster.domain}: {inside.name} has "
                f"{inside.rate / 1e9:.0f} GB/s, {between.name} {between.rate / 1e9:.0f}"
            )


def _guess(answer: Answer) -> Iterator[str]:
    guess = answer.guess
    if guess is None:
        return
    if not guess.fits:
        yield f"your layout {say(guess.strategy)} does not fit by {as_text.size(-guess.room)} per GPU"
        if answer.change is not None:
            slower = answer.change.found.seconds / answer.winner.seconds - 1
            yield (
                f"smallest change that fits: {answer.change.words} "
                f"({answer.change.found.seconds:.3g} s a step, {slower:+.1%} against the best)"
            )
        return
    if guess.strategy == answer.winner.strategy:
        yield "your layout is the best"
    else:
        yield f"your layout {say(guess.strategy)} is {verdict(answer.winner, guess)}"


def arithmetic(answer: Answer) -> list[str]:
    """How the batch, the memory and the time of the winner come about."""
    return [*_explained(answer.winner), *_compared(answer)]


def _explained(found: Found) -> Iterator[str]:
    training, layout, time = found.job.training, found.strategy.layout, found.time
    yield _batch(found)
    product = " x ".join(
        f"{axis} {getattr(layout, axis)}"
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        if getattr(layout, axis) > 1
    )
    yield f"devices: {product or 'one'} = {layout.world_size}"
    tokens = training.global_batch * training.sequence
    yield (
        f"rate: {tokens:,} tokens / {time.total:.4g} s = {time.tokens_per_second:,.0f} tokens/s; "
        f"{time.flops_per_device / 1e12:.0f} TFLOP/s a device = MFU {time.mfu:.1%}"
    )
    for what, seconds in time.pieces:
        yield f"  {what}: {seconds:.4g} s, {seconds / time.total:.1%}"
    for axis, seconds in time.hidden.items():
        yield f"  {axis} beside computation: {seconds:.4g} s"


def _compared(answer: Answer) -> Iterator[str]:
    others = [("runner-up", answer.runner_up), ("your layout", answer.guess)]
    for name, other in others:
        if other is None or other.strategy == answer.winner.strategy:
            continue
        yield f"{name} {say(other.strategy)}: {other.seconds:.4g} s, {as_text.size(other.bytes)}"
        yield f"  {_batch(other)}"
        for each in differences(answer.winner, other):
            yield f"  {each.seconds:+.4g} s ({each.share:+.1%}) {each.piece}: {each.why}"


def _batch(found: Found) -> str:
    """How a step's sequences become passes."""
    layout, count = found.strategy.layout, found.time.microbatches
    return (
        f"batch: {found.job.training.global_batch} sequences / ({layout.dp} data ranks x "
        f"micro-batch {found.strategy.micro_batch}) = {count} accumulation steps"
    )
