"""What rank 0 says to the other ranks of its engine, and what they say back: pickled records.

Tensors of a step travel as numpy arrays, which pickle in a tenth of the time. Hidden states and
logits are no messages: they go from rank to rank through the process group.
"""

from __future__ import annotations

# N tokens, S sequences, W rows whose logits are wanted
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from fivefold.axes.part import Slice
from fivefold.core.layout import Layout
from fivefold.engines.serve.paged.batch import PagedBatch


@dataclass(frozen=True, slots=True)
class Start:
    """Load a part of this model. `port`: of the store that ranks meet at."""

    model: str
    layout: Layout
    dtype: torch.dtype
    device: str
    deterministic: bool
    threads: int
    memory_share: float
    rank: int
    port: int


@dataclass(frozen=True, slots=True)
class Step:
    """Compute a step: the fields of a PagedBatch, blocks to copy first, and whether the logits of
    all wanted rows follow at once."""

    batch: Mapping[str, np.ndarray]
    copies: tuple[tuple[int, int], ...]
    head: bool

    @classmethod
    def of(cls, batch: PagedBatch, copies: tuple[tuple[int, int], ...], head: bool) -> Step:
        """From the tensors of rank 0."""
        arrays = {f.name: getattr(batch, f.name).cpu().numpy() for f in fields(batch)}
        return cls(arrays, copies, head)

    def tensors(self, device: torch.device) -> PagedBatch:
        """The batch on a rank's device."""
        return PagedBatch(**{n: torch.from_numpy(a).to(device) for n, a in self.batch.items()})

    @property
    def rows(self) -> int:
        """W."""
        return len(self.batch["rows"])


@dataclass(frozen=True, slots=True)
class Head:
    """The logits of some of the step's wanted rows, by their places among them."""

    places: list[int]


@dataclass(frozen=True, slots=True)
class Profile:
    """Run a worst step over a cache of so many blocks, and measure it."""

    step: Step
    blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class TakeCache:
    """The cache of the engine: as many blocks on every rank."""

    blocks: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class States:
    """Hidden states of one sequence from its beginning, without the cache."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class NewWeights:
    """This rank's boxes of one or more weights."""

    values: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Repack:
    """What is packed beside the weights follows them."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back."""

    level: int


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Take it again, with new weights or the old ones."""

    values: Mapping[str, Tensor] | None


Order = Step | Head | Profile | TakeCache | States | NewWeights | Repack | Sleep | WakeUp


@dataclass(frozen=True, slots=True)
class Hello:
    """The process is there, and ready to meet the others."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The part has its weights: where they lie in the whole, and what a token takes in the cache."""

    slices: Mapping[str, Slice]
    elements: int
    cache_elements: int
    """Of keys and values, a token."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a worst step takes at its peak on top of the weights, and what memory there is."""

    step: int
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Done:
    """An order was obeyed that has no other answer."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Last words: what failed, and when (`time.time`): the first to fail is the cause."""

    why: str
    mend: str
    at: float


Reply = Hello | Loaded | Measured | Done | Broken
