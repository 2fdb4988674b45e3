"""An answer on a terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from fivefold.observe import format as as_text
from fivefold.plan.cost import RunCost
from fivefold.plan.explain.compare import memory_in_words, pieces_in_words, verdict
from fivefold.plan.explain.notes import arithmetic, notes
from fivefold.plan.explain.record import bill
from fivefold.plan.search.answer import Answer
from fivefold.plan.search.found import Found, say


def print_answer(answer: Answer, console: Console, explain: bool) -> None:
    """The winner, the ranking, the front, what to know; with `explain` the arithmetic."""
    _head(answer, console)
    console.print(ranking(answer))
    if len(answer.front) > 1:
        console.print()
        console.print(front(answer))
    console.print()
    for note in notes(answer)[answer.refused is not None :]:  # it stands above already
        console.print(f"- {note}", soft_wrap=True, markup=False)
    if explain:
        console.print("\n[bold]arithmetic[/bold]")
        for line in arithmetic(answer):
            console.print(line, soft_wrap=True, markup=False)
    counts = answer.counts
    console.print(
        f"\nlooked at {counts.shapes:,} shapes, bounded {counts.bounded:,} sets of choices, judged "
        f"{counts.judged:,} strategies",
        soft_wrap=True,
    )


def _head(answer: Answer, console: Console) -> None:
    job, winner = answer.job, answer.winner
    training, time = job.training, winner.time
    console.print(
        f"[bold]{job.shape.name}[/bold] on {job.cluster.name}: {training.global_batch} sequences of "
        f"{training.sequence:,} tokens a step, {training.compute}, {job.software.name}",
        soft_wrap=True,
    )
    if answer.refused is not None:
        console.print(
            f"\nyour layout cannot be run: {answer.refused}", soft_wrap=True, markup=False
        )
    console.print(f"\nbest: [bold]{say(winner.strategy)}[/bold]", soft_wrap=True)
    console.print(
        f"  {as_text.latency(time.total)} a step (±{time.error:.0%}), MFU {time.mfu:.1%}, "
        f"{as_text.count(time.tokens_per_second)} tokens/s, {memory_in_words(winner)} a device",
        soft_wrap=True,
    )
    console.print(f"  of the step: {pieces_in_words(winner)}", soft_wrap=True)
    for name, spot in (("", False), ("on spot instances: ", True)):
        cost = bill(winner, spot=spot)
        if cost is not None:
            console.print(f"  {name}{cost_in_words(cost)}", soft_wrap=True)
    console.print()


def cost_in_words(cost: RunCost) -> str:
    """Days, energy, money and what interruptions cost."""
    if not math.isfinite(cost.days):
        often = cost.goodput.interruptions_a_day
        return f"no end in sight: {as_text.count(often)} interruptions a day leave no progress"
    parts = [f"{cost.days:.3g} days", f"{as_text.count(cost.device_hours)} device hours"]
    if cost.energy:
        parts.append(f"{as_text.count(cost.energy)} kWh")
    if cost.dollars is not None:
        parts.append(f"${as_text.count(cost.dollars)} at ${cost.price:.2f} an hour")
    goodput = cost.goodput
    text = f"goodput {goodput.share:.1%}"
    if goodput.between:
        text += (
            f", {goodput.interruptions_a_day:.2g} interruptions a day, a checkpoint every "
            f"{as_text.duration(goodput.interval)}"
        )
    return ", ".join([*parts, text])


def ranking(answer: Answer) -> Table:
    """The best of each shape."""
    table = _columns(
        "ranking: the best of each shape", "", "strategy", "a step", "MFU", "memory", "why not"
    )
    for place, each in enumerate(answer.ranking, 1):
        why = "" if each is answer.winner else verdict(answer.winner, each)
        table.add_row(str(place), *_cells(each), why)
    guess = answer.guess
    if guess is not None and guess not in answer.ranking:
        why = verdict(answer.winner, guess) if guess.fits else "does not fit"
        table.add_row("yours", *_cells(guess), why)
    return table


def front(answer: Answer) -> Table:
    """What is beaten by nothing in time, memory and cost at once."""
    table = _columns(
        "front: nothing is better in time, memory and device-seconds (of a step) at once",
        "devices", "strategy", "a step", "MFU", "memory", "device-s",
    )  # fmt: skip
    for each in answer.front:
        table.add_row(str(each.job.devices), *_cells(each), f"{each.device_seconds:,.0f}")
    return table


def _columns(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for name in names:
        numeric = name in ("a step", "MFU", "memory", "devices", "device-s", "")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric,
                         overflow="fold")  # fmt: skip
    return table


def _cells(found: Found) -> tuple[str, str, str, str]:
    """The strategy is written so that its lines break between its parts."""
    return (
        say(found.strategy).replace(",", ", "), as_text.latency(found.seconds), f"{found.time.mfu:.1%}",
        as_text.size(found.bytes),
    )  # fmt: skip
