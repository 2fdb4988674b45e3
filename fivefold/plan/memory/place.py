"""What one rank computes of a micro-batch: sizes that every operator's memory follows from."""

from __future__ import annotations

# B batch, S tokens of a row on one context rank, D hidden, H query heads, K key/value heads
import math
from dataclasses import dataclass

from fivefold.axes.tp.plan import Split, share
from fivefold.core.layout import Layout
from fivefold.plan.shape import ModelShape
from fivefold.plan.workload import Recompute, Software, Strategy, Training

WIDE = 4  # bytes of what is summed in fp32
INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Place:
    """One rank of a layout and one micro-batch.

    element: bytes of one element of the compute format. length: tokens of a row here. tensor: ways
    that divide a sequence between blocks. remakes: see `Software`.
    """

    shape: ModelShape
    software: Software
    recompute: Recompute
    element: int
    batch: int
    length: int
    sequence: int
    tp: int
    tensor: int
    cp: int
    ulysses: int
    ring: str
    ep: int
    remakes: bool

    @classmethod
    def of(
        cls, shape: ModelShape, training: Training, strategy: Strategy, software: Software
    ) -> Place:
        """From what a plan is asked for."""
        layout = strategy.layout
        return cls(
            shape, software, strategy.recompute, element_bytes(training, software),
            strategy.micro_batch, context_length(training.sequence, layout), training.sequence,
            layout.tp, layout.tp if layout.sequence_parallel else 1,
            layout.cp, layout.ulysses, layout.cp_kind, layout.ep,
            software.remakes and strategy.recompute == "none",
        )  # fmt: skip

    @property
    def inside(self) -> int:
        """Tokens inside a divided module."""
        return self.batch * self.length

    @property
    def tokens(self) -> int:
        """Tokens between blocks."""
        return self.batch * -(-self.length // self.tensor)

    @property
    def hidden(self) -> int:
        """Bytes of hidden states between blocks."""
        return self.tokens * self.shape.config.hidden_size * self.element

    @property
    def gathered(self) -> int:
        """Bytes of hidden states inside a divided module."""
        return self.inside * self.shape.config.hidden_size * self.element

    @property
    def heads(self) -> int:
        """Query heads here."""
        return self.shape.config.num_heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Key/value heads here, of which tensor ranks may share one."""
        return max(1, self.shape.config.num_kv_heads // self.tp)

    def columns(self, size: int) -> int:
        """This rank's columns of a feed-forward of `size`."""
        return share(size, Split(0), self.shape.config, 0, self.tp)[1]

    @property
    def words(self) -> int:
        """Rows of the vocabulary here."""
        return self.columns(self.shape.config.vocab_size)


def element_bytes(training: Training, software: Software) -> int:
    """Of the format that activations have: 8-bit formats are those of products alone."""
    return {"fp32": 4, "fp64": 8}.get(training.compute, min(2, software.parameter_bytes) or 2)


def context_length(sequence: int, layout: Layout) -> int:
    """Tokens of a row on one context rank, padded as `axes.cp.split` pads."""
    if layout.cp == 1:
        return sequence
    multiple = layout.cp * math.lcm(2, layout.tp)
    return -(-sequence // multiple) * multiple // layout.cp
