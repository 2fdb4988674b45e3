"""A bar while a load runs; nothing where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fivefold.engines.serve.load.outcome import Outcome


class LoadProgress:
    """Shows how many requests have ended, are out, have failed, and the tokens a second."""

    def __init__(self, name: str, requests: int, console: Console, *, shown: bool = True) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"), TimeElapsedColumn(),
        )  # fmt: skip
        hidden = not (shown and console.is_terminal)
        self._bar = Progress(*columns, console=console, disable=hidden, transient=True)
        self._task = self._bar.add_task(name, total=requests, status="")
        self._out = self._failed = self._tokens = 0
        self._began = time.perf_counter()

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def sent(self) -> None:
        """A request went out."""
        self._out += 1
        self._show()

    def token(self) -> None:
        """A piece of an answer came."""
        self._tokens += 1

    def ended(self, outcome: Outcome) -> None:
        """A request has ended."""
        self._out -= 1
        self._failed += not outcome.ok
        self._bar.advance(self._task)
        self._show()

    def _show(self) -> None:
        if self._bar.disable:
            return
        rate = self._tokens / max(time.perf_counter() - self._began, 1e-9)
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._task, status=f"{self._out} out, {rate:,.0f} tokens/s{failed}")
