"""TensorBoard event files of a run, through torch.utils.tensorboard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.core.errors import TrainingError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class EventFiles:
    """One event file for each start of the run, opened at the first record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._purge_from: int | None = None
        self._writer: SummaryWriter | None = None

    def purge_after(self, step: int) -> None:
        """Make TensorBoard forget what earlier event files say about steps after `step`."""
        self.close()
        self._purge_from = step + 1

    def add(self, group: str, row: dict[str, Any]) -> None:
        """Add every number of `row` except `step` as the scalar `group/<key>` at that step.

        Raises TrainingError when the file cannot be written.
        """
        try:
            writer = self._open()
            for key, value in row.items():
                number = _number(value)
                if key != "step" and number is not None:
                    writer.add_scalar(f"{group}/{key}", number, int(row["step"]))
            # Its queue is in memory: without this a kill takes the steps before a checkpoint too.
            writer.flush()
        except OSError as error:
            raise TrainingError(
                f"cannot write TensorBoard events in {self.folder}: {error.strerror or error}",
                "free disk space, or set observe.tensorboard=false",
            ) from None

    def close(self) -> None:
        """Close the event file; closing twice is harmless."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Imported here: loading TensorBoard takes longer than reading a run's records.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_from)
        return self._writer


def _number(value: Any) -> float | None:
    if isinstance(value, bool | str | None | dict | list):
        return None
    number = float(value)
    return number if math.isfinite(number) else None
