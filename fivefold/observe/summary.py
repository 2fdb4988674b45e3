"""A run in a few words and figures: what stands on top of its report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fivefold.observe import format as as_text
from fivefold.observe.run_records import RunRecords

WARM_UP_STEPS = 2  # left out of medians where there are enough others: pages, caches, compilation
PERPLEXITY_LIMIT = 20.0  # nats; e**20 says nothing any more


def status(run: RunRecords) -> tuple[str, str]:
    """(class, words): finished, stopped or broken, and where."""
    last, wanted = run.metrics[-1], run.steps_wanted
    of = f" of {wanted:,}" if wanted else ""
    if run.not_finite and run.not_finite[-1] == last["step"] and last.get("loss") is None:
        return "bad", f"stopped: the loss was not finite at step {last['step']:,}{of}"
    if wanted and last["step"] >= wanted:
        return "good", f"finished: {wanted:,} of {wanted:,} steps"
    ended = [e["event"] for e in run.events if e["event"] in ("start", "resume", "stop")]
    if ended and ended[-1] == "stop":
        return "open", f"stopped at step {last['step']:,}{of}"
    return "open", f"at step {last['step']:,}{of}: running, or killed"


def tiles(run: RunRecords) -> list[tuple[str, str, str]]:
    """(what, value, remark) of the figures one looks for first; those not recorded are left out."""
    found: list[tuple[str, str, str]] = []
    losses, held_out = run.curve("loss"), run.held_out
    if len(losses):
        first, last = losses[[0, -1], 1].tolist()
        found.append(("Loss", as_text.number(last), f"{as_text.number(first)} at first"))
    if len(held_out):
        step, best = held_out[held_out[:, 1].argmin()].tolist()
        remark = f"best, at step {step:,.0f}"
        if best < PERPLEXITY_LIMIT:
            remark += f"; perplexity {as_text.number(math.exp(best), 3)}"
        found.append(("Held-out loss", as_text.number(best), remark))
    for key, what, text in (
        ("tokens_per_second", "Tokens per second", as_text.count),
        ("mfu", "MFU", as_text.share),
    ):
        values = run.curve(key)[:, 1].tolist()
        if values:
            steady = values[WARM_UP_STEPS:] if len(values) > 2 * WARM_UP_STEPS else values
            found.append((what, text(statistics.median(steady)), _spread(steady, text)))
    memory = run.curve("memory_bytes")
    if len(memory):
        found.append(("Peak memory", as_text.size(float(memory[:, 1].max())), "of rank 0"))
    tokens = run.curve("tokens")
    if len(tokens):
        found.append(("Tokens trained on", as_text.count(float(tokens[-1, 1])), "with a target"))
    seconds = float(run.curve("step_seconds")[:, 1].sum())
    if seconds:
        found.append(("Time in steps", as_text.duration(seconds), _restarts(run)))
    return found


def history(run: RunRecords) -> list[tuple[str, str, str]]:
    """(UTC time, what, details) of every start, resume and stop."""
    rows = []
    for event in run.events:
        if event["event"] not in ("start", "resume", "stop"):
            continue
        about = []
        if event["event"] == "resume" and "step" in event:
            about.append(f"after step {event['step']}")
        if "layout" in event:
            about.append(f"layout {event['layout']}")
        rows.append((_clock(event.get("time")), event["event"], ", ".join(about)))
    return rows


def hardware(run: RunRecords) -> list[tuple[str, str]]:
    """(what, value) of the machine, bytes in words."""
    return [
        (
            key.removesuffix("_bytes").replace("_", " "),
            as_text.size(value) if key.endswith("_bytes") and _is_size(value) else str(value),
        )
        for key, value in run.hardware.items()
    ]


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float)


def _spread(values: Sequence[float], text: Any) -> str:
    if len(values) < 4:
        return "median"
    low, _, high = statistics.quantiles(values, n=4)
    return f"median; half between {text(low)} and {text(high)}"


def _restarts(run: RunRecords) -> str:
    times = len(run.resumes)
    return "in one go" if not times else f"resumed {'once' if times == 1 else f'{times} times'}"


def _clock(seconds: Any) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return "—"
