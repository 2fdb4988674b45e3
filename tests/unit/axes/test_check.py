"""Layouts that do not fit a model name the number that is wrong, and the mend."""

from __future__ import annotations

import re

import pytest

from fivefold.axes.check import check_microbatches, check_model
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from tests.parity.lattice.cases import model_config


@pytest.mark.parametrize(
    ("model", "layout", "message", "mend"),
    [
        ("dense", "tp=3", "tp=3 does not divide the model's 8 attention heads", "use tp=2"),
        ("dense", "ep=2,dp_shard=2", "ep=2 does not divide the model's 0 experts", "use ep=1"),
        ("moe", "ep=3,dp_shard=3", "ep=3 does not divide the model's 8 experts", "a divisor of 8"),
        ("moe", "ep=2", "ep=2 does not divide the 1 ranks", "use ep=1"),
        ("moe", "tp=2,sequence_parallel=false", "experts with tp=2 need sequence_parallel", "true"),
        ("moe", "cp=2", "cp=2 would pad sequences of 25 tokens to a multiple of 4", "length=24"),
        ("moe", "tp=8", "any of the model's 20 columns of shared experts", "a smaller tp"),
        ("dense", "pp=5", "4 layers cannot be split into 5 pipeline stages", "at most 4"),
        ("dense", "pp=4,schedule=interleaved,virtual=2", "4 layers cannot be split into 8", "4"),
        ("dense", "pp=2,stage_layers=1/1/2", "has 3 stages, the pipeline 2", "give 2 numbers"),
        ("dense", "pp=2,stage_layers=1/2", "is no split of 4 layers", "add up to 4"),
        ("dense", "tp=2", "sequences of 25 tokens do not divide over tp=2", "sequence_length=24"),
        ("dense", "cp=16", "cp=16 cuts a sequence into 32 chunks", "cp=12"),
        ("dense", "cp=4,ulysses=3", "ulysses=3 does not divide cp=4", "ulysses=1, 2, 4"),
    ],
)
def test_what_does_not_fit(model: str, layout: str, message: str, mend: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)) as caught:
        check_model(Layout.parse(layout), model_config(model), 25)
    assert mend in caught.value.mend


def test_too_few_micro_batches_for_the_schedule() -> None:
    check_microbatches(Layout(pp=4), 1)
    with pytest.raises(LayoutError, match="at least 8 micro-batches, not 4"):
        check_microbatches(Layout(pp=4, schedule="dualpipe"), 4)


@pytest.mark.parametrize("text", ["schedule=zb", "cp_kind=rings", "sequence_parallel=yes"])
def test_words_of_a_layout_are_checked(text: str) -> None:
    with pytest.raises(LayoutError, match=text.split("=")[0]):
        Layout.parse(text)


def test_a_layout_reads_what_it_writes() -> None:
    layout = Layout.parse(
        "dp_shard=2,tp=2,cp=2,zero=1,ulysses=2,cp_kind=gather,pp=2,stage_layers=3/1,"
        "order=cp/tp/pp/dp_shard/dp_replicate"
    )
    assert Layout.parse(str(layout)) == layout
