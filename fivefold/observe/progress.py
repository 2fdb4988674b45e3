"""What a training run shows while it goes: one living line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fivefold.core.environment import read_ranks
from fivefold.observe import format as as_text

PLAIN_SECONDS = 5.0  # between two lines where the output is no terminal
REDRAW_SECONDS = 0.1
RATE_STEPS = 50  # steps whose time predicts the rest
BAR_CELLS = 16


class TrainProgress:
    """Shows each step's record. Silent on every rank but 0, and when not `enabled`."""

    def __init__(self, steps: int, *, enabled: bool = True, console: Console | None = None) -> None:
        self.steps = steps
        self.console = console or Console()
        self._enabled = enabled and read_ranks().is_main
        self._live: Live | None = None
        self._shown = -math.inf
        self._shown_step: int | None = None
        self._row: dict[str, Any] = {}
        self._ends: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)  # step, when it ended

    def __enter__(self) -> TrainProgress:
        if self._enabled and self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=False)
            self._live.start()
            # A run may be killed by -9, which could not bring the hidden cursor back.
            self.console.show_cursor(True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._row and self._shown_step != self._row.get("step"):
            self._show()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, row: dict[str, Any]) -> None:
        """Take the record of a step (the keys of metrics.jsonl; absent ones are not shown)."""
        if not self._enabled:
            return
        now = time.monotonic()
        if not self._ends and row.get("step_seconds"):
            self._ends.append((row["step"] - 1, now - row["step_seconds"]))
        self._ends.append((row["step"], now))
        self._row = row
        between = REDRAW_SECONDS if self._live is not None else PLAIN_SECONDS
        if now - self._shown >= between or row["step"] >= self.steps:
            self._show()

    def note(self, text: str) -> None:
        """Print a line of its own, above the living one."""
        if self._enabled:
            self.console.print(Text(text), soft_wrap=True)

    def _show(self) -> None:
        if self._live is not None:
            width = self.console.width
            blocks = not self.console.options.ascii_only
            line = progress_line(self._row, self.steps, self._eta(), width - 1, blocks=blocks)
            self._live.update(Text(line, no_wrap=True, overflow="crop"), refresh=True)
        else:
            line = ", ".join(fields(self._row, self.steps, self._eta()))
            self.console.print(Text(line), soft_wrap=True)
        self._shown, self._shown_step = time.monotonic(), self._row["step"]

    def _eta(self) -> float | None:
        """Seconds to the last step at the pace of late, evaluations and checkpoints included."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return (self.steps - last) * (ended - began) / max(1, last - first)


def progress_line(
    row: dict[str, Any], steps: int, eta: float | None, width: int, *, blocks: bool = True
) -> str:
    """The step's numbers in at most `width` cells: a bar where there is room for one,
    and where the terminal has its characters (`blocks`).

    On a narrow terminal fields are left out, from the end but for the time left.
    """
    parts = fields(row, steps, eta)
    last = parts.pop() if eta is not None else None
    tail = [last] if last else []
    while len(parts) > 1 and len("  ".join(parts + tail)) > width:
        parts.pop()
    line = "  ".join(parts + tail)
    if blocks and len(line) + BAR_CELLS + 2 <= width:
        return f"{_bar(row['step'] / max(1, steps))}  {line}"
    return line[:width]


def fields(row: dict[str, Any], steps: int, eta: float | None) -> list[str]:
    """`step 3/120`, `loss 4.2`, …: the most important first, the time left last."""
    parts = [f"step {row['step']}/{steps}"]
    shown = (
        ("loss", lambda v: f"loss {v:.4f}"),
        ("tokens_per_second", lambda v: f"{as_text.count(v)} tok/s"),
        ("mfu", lambda v: f"MFU {as_text.share(v)}"),
        ("grad_norm", lambda v: f"|g| {v:.3g}"),
        ("lr", lambda v: f"lr {as_text.scientific(v, 2)}"),
        ("memory_bytes", as_text.size),
    )
    for key, text in shown:
        value = row.get(key)
        if isinstance(value, int | float):
            parts.append(text(value))
    if eta is not None:
        parts.append(f"ETA {as_text.duration(eta)}")
    return parts


def _bar(share: float) -> str:
    eighths = round(min(1.0, max(0.0, share)) * BAR_CELLS * 8)
    full, part = divmod(eighths, 8)
    bar = "█" * full + ("▏▎▍▌▋▊▉"[part - 1] if part else "")
    return bar.ljust(BAR_CELLS, "░")
