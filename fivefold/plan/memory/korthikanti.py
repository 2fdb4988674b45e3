"""Activations of a GPT layer by the formulae of Korthikanti et al. 2022 (arXiv 2205.05198, table 2).

16-bit formats; masks of one byte; what is small (means and deviations of norms) is left out. With
s sequence, b micro-batch, h hidden, a heads, t tensor ranks, in bytes a layer:

    no parallelism                     sbh (34 + 5 as/h)
    tensor                             sbh (10 + 24/t + 5 as/(ht))
    tensor and sequence                sbh (34 + 5 as/h) / t
    tensor, selective                  sbh (10 + 24/t)
    tensor and sequence, selective     sbh 34/t
    full                               sbh 2

The ledger gives the same (a test holds both together) for a `Software` with unfused attention, with
dropout, and without keeping what is gathered.
"""

from __future__ import annotations

from typing import Literal


def layer_bytes(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
) -> float:
    """Bytes that one layer keeps of a micro-batch."""
    whole = sequence * batch * hidden
    if recompute == "full":
        return 2.0 * whole
    scores = 0 if recompute == "selective" else 5 * heads * sequence * sequence * batch
    if sequence_parallel:
        return (34 * whole + scores) / tensor
    return 10 * whole + (24 * whole + scores) / tensor


def first_stage_bytes(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    layers: int,
    *,
    tensor: int,
    stages: int,
    virtual: int = 1,
    recompute: Literal["none", "selective", "full"] = "none",
) -> float:
    """The first stage's share with sequence parallelism: as many as all L layers of one
    micro-batch, times 1 + (p-1)/(pv) where stages are interleaved (section 4.2.3)."""
    one = layer_bytes(
        sequence, batch, hidden, heads,
        tensor=tensor, sequence_parallel=True, recompute=recompute,
    )  # fmt: skip
    more = 1 + (stages - 1) / (stages * virtual) if virtual > 1 else 1.0
    return layers * one * more
