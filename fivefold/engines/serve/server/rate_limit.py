"""So many a minute: a bucket that fills steadily and may be overdrawn once."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """`per_minute` units. What a request costs is known at its end, so it may overdraw the bucket;
    the next one waits until that is filled up.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def wait(self) -> float:
        """Seconds until there is a unit; 0 when there is one."""
        self._fill()
        if self._level >= 1:
            return 0.0
        return (1 - self._level) * 60 / self.per_minute

    def take(self, units: int) -> None:
        """Use units up."""
        self._fill()
        self._level -= units

    def _fill(self) -> None:
        now = self._clock()
        self._level += (now - self._at) * self.per_minute / 60
        self._level = min(self._level, float(self.per_minute))
        self._at = now
