"""Bytes a rank holds between backward and update are what ZeRO's table says, to the byte.

Rajbhandari et al. 2020, section 3; N elements over R ranks, fp32 moments of 8 bytes an element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fivefold.core.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from tests.dist import cases
from tests.dist.harness import Workers

LAYOUTS = [
    "",
    "dp_replicate=2",
    *(f"dp_shard={ranks},zero={zero}" for ranks in (2, 4) for zero in (1, 2, 3)),
    "dp_replicate=2,dp_shard=2,zero=2",
    "dp_replicate=2,dp_shard=2,zero=3",
]


def table(layout: Layout, precision: str, elements: int) -> dict[str, int]:
    """What each kind of state should take on one rank."""
    zero, part = (layout.zero if layout.dp_shard > 1 else 0), elements // layout.dp_shard
    wide = precision == "fp32" or zero == 3  # FSDP's sharded parameters are their own masters
    return {
        "parameters": (part if zero == 3 else elements) * (4 if wide else 2),
        "masters": 0 if wide else part * 4,
        "gradients": (part if zero >= 2 else elements) * 4,
        "moments": part * 8,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_what_zero_says(
    workers: Callable[[int], Workers], layout: str, precision: str
) -> None:
    elements = sum(p.numel() for p in Decoder(parse_config(cases.EVEN), device="meta").parameters())
    chosen = Layout.parse(layout)
    wanted = table(chosen, precision, elements)
    for found in workers(chosen.world_size).run(cases.held_bytes, layout, precision):
        assert found == wanted


def test_a_leftover_would_be_seen(workers: Callable[[int], Workers]) -> None:
    """The count finds what nobody told it of."""
    wanted: dict[str, Any] = workers(1).run(cases.held_bytes, "")[0]
    found = workers(1).run(with_leftover)[0]
    assert found["gradients"] == wanted["gradients"] + 4000


def with_leftover() -> dict[str, int]:
    real, kept = cases._backward, []

    def backward(run: cases.Run) -> None:
        real(run)
        kept.append(torch.ones(1000))

    cases._backward = backward
    try:
        return cases.held_bytes("")
    finally:
        cases._backward = real
