"""Outcomes made by hand."""

from __future__ import annotations

from typing import Any

from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.run import ClosedLoop, OpenLoop, Run


def answered(
    scheduled: float = 0.0, ttft: float = 0.5, gaps: tuple[float, ...] = (0.1, 0.1), **more: Any
) -> Outcome:
    """An answer whose first token came `ttft` after it was due."""
    first = scheduled + ttft
    last = first + sum(gaps)
    given: dict[str, Any] = {
        "index": 0, "scheduled": scheduled, "sent": scheduled, "ended": last, "first": first,
        "last": last, "gaps": list(gaps), "completion_tokens": len(gaps) + 1,
        "asked_output": len(gaps) + 1, "prompt_tokens": 8, "asked_input": 8,
        "counted_by": "usage", "finish_reason": "length",
    }  # fmt: skip
    return Outcome(**(given | more))


def failed(scheduled: float = 0.0, kind: str = "timeout", after: float = 1.0) -> Outcome:
    return Outcome(0, scheduled, scheduled, scheduled + after, failure=kind, detail=f"{kind}!")


def run_of(*outcomes: Outcome, open_loop: bool = False) -> Run:
    load = OpenLoop([o.scheduled for o in outcomes], "made up") if open_loop else ClosedLoop(2)
    return Run(load, list(outcomes), loop_lag=[0.0])
