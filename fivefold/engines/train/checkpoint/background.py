"""One piece of work in a thread, whose error waits for whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fivefold.core.errors import CheckpointError, FivefoldError


class Background:
    """Runs `work` at once. The thread does not keep a dying process alive: a save may be cut off
    at any point without harm.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait for the end. Raises CheckpointError if the work failed."""
        self._thread.join()
        if isinstance(self._error, FivefoldError):
            raise self._error
        if self._error is not None:
            # Ranks agree on their errors while all live; this one lost its peers.
            raise CheckpointError(
                f"saving was cut off ({type(self._error).__name__}: {self._error})",
                "look for the rank that failed first",
            ) from self._error

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None  # with it goes the staged copy of the state
