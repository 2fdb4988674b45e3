"""Layouts that context parallelism cannot run are refused with the number and the mend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.axes.cp.check import check
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.model.families import parse_config

CONFIG = parse_config({
    "model_type": "llama", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
})  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        "cp=4",
        "cp=8",
        "cp=4,ulysses=2",
        "cp=4,ulysses=4",
        "cp=6,ulysses=6,tp=2",
        "cp=3,ulysses=3,tp=4",
    ],
)
def test_layouts_that_run(layout: str) -> None:
    check(Layout.parse(layout), CONFIG, 37)


@pytest.mark.parametrize(
    ("layout", "length", "told"),
    [
        ("cp=4,ulysses=3", 64, r"ulysses=3 does not divide cp=4; use one of ulysses=1, 2, 4"),
        ("cp=8,ulysses=8", 64, r"12 attention heads do not divide by ulysses=8; use ulysses=4,"),
        ("cp=4,ulysses=4,tp=2", 64, r"do not divide by tp=2 x ulysses=4; use ulysses=2,"),
        ("cp=8", 15, r"cp=8 cuts a sequence into 16 chunks.*sequence_length=15; use cp=7 or less"),
    ],
)
def test_layouts_that_do_not(layout: str, length: int, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        check(Layout.parse(layout), CONFIG, length)


def test_the_mend_works() -> None:
    odd = replace(CONFIG, num_heads=7, num_kv_heads=7)
    with pytest.raises(LayoutError, match="use ulysses=1,"):
        check(Layout.parse("cp=4,ulysses=2"), odd, 64)
    check(Layout.parse("cp=4,ulysses=1"), odd, 64)
