"""What the scheduler refuses."""

from __future__ import annotations

from fivefold.core.errors import FivefoldError


class SchedulingError(FivefoldError):
    """A setting that cannot work, or calls in an order that would lose tokens or blocks."""


class QueueFullError(FivefoldError):
    """The queue has no place. `retry_after` is an estimate in seconds of when it will."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting already", f"try again in {retry_after:.0f} s"
        )
        self.retry_after = retry_after
