"""The one place that reads the process environment: torchrun's variables and the cache folder."""

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


def under_torchrun() -> bool:
    """True in a process that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def cache_folder() -> Path:
    """Where converted weights, tokenized shards and measurements are kept between runs (XDG)."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(root) / "fivefold"
