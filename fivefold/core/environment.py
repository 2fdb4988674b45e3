"""The one place that touches the process environment: torchrun's variables, folders, OpenMP's waits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ranks:
    """Who this process is among those torchrun started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restart: int

    @property
    def is_main(self) -> bool:
        """Rank 0 prints and writes run records."""
        return self.rank == 0


def read_ranks() -> Ranks:
    """RANK, WORLD_SIZE, LOCAL_RANK as torchrun sets them; one process when they are absent."""
    return Ranks(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


# Some tenths of a millisecond: more than between two operators of a step.
SPINS = "20000"


def bound_spinning() -> None:
    """Let idle threads of OpenMP sleep after a while, unless the user said how they are to wait.

    By default GNU's runtime spins for milliseconds at the end of every parallel loop. Where another
    process wants the core, that is time which neither of them gets. It is read once, when torch
    loads the runtime; child processes inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def under_torchrun() -> bool:
    """True in a process that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def cache_folder() -> Path:
    """Where converted weights, tokenized shards and measurements are kept between runs (XDG)."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(root) / "fivefold"
