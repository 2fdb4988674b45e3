"""The ledger equals the published formulae where their assumptions are its own."""

from __future__ import annotations

from collections import Counter

import pytest

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.plan.memory.block import block
from fivefold.plan.memory.depth import layers_of
from fivefold.plan.memory.korthikanti import first_stage_bytes, layer_bytes
from fivefold.plan.memory.ledger import Ledger, ledger
from fivefold.plan.memory.place import Place
from fivefold.plan.memory.zero import zero_bytes
from fivefold.plan.models.gpt import gpt
from fivefold.plan.shape import ModelShape
from fivefold.plan.software import MEGATRON_2021, MEGATRON_2022
from fivefold.plan.workload import Recompute, Software, Strategy, Training

SEQUENCE, BATCH = 2048, 4
GPT = gpt("22B", 48, 6144, 64)
ZERO = Software("zero", gradient_bytes=2, flat_shards=True)


def kept(
    shape: ModelShape, layout: Layout, recompute: Recompute, software: Software
) -> Counter[str]:
    training = Training(SEQUENCE, BATCH * layout.dp)
    place = Place.of(shape, training, Strategy(layout, BATCH, recompute), software)
    found = block(place, False, "accumulate").kept
    del found["statistics"]  # two numbers a row and norm, which the formulae leave out
    return found


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_gpt_layer_by_korthikanti(
    tensor: int, sequence_parallel: bool, recompute: Recompute
) -> None:
    if sequence_parallel and (tensor == 1 or recompute == "full"):
        pytest.skip("the paper's full recomputation has no sequence parallelism")
    software = MEGATRON_2022 if sequence_parallel else MEGATRON_2021
    layout = Layout(tp=tensor, sequence_parallel=sequence_parallel)
    wanted = layer_bytes(
        SEQUENCE, BATCH, 6144, 64,
        tensor=tensor, sequence_parallel=sequence_parallel, recompute=recompute,
    )  # fmt: skip
    assert kept(GPT, layout, recompute, software).total() == wanted


@pytest.mark.parametrize(
    ("heads", "hidden", "scores", "saved"), [(96, 12288, 80, 0.70), (128, 20480, 64, 0.65)]
)
def test_what_the_paper_says_of_scores(heads: int, hidden: int, scores: int, saved: float) -> None:
    """Section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG, and 70 % and 65 % are saved."""
    whole = layer_bytes(SEQUENCE, BATCH, hidden, heads)
    left = layer_bytes(SEQUENCE, BATCH, hidden, heads, recompute="selective")
    assert whole == pytest.approx(SEQUENCE * BATCH * hidden * (34 + scores))
    assert 1 - left / whole == pytest.approx(saved, abs=0.01)


@pytest.mark.parametrize("virtual", [1, 3])
def test_the_first_stage_keeps_the_layers_of_one_model(virtual: int) -> None:
    """Section 4.2.3: L layers of a micro-batch whatever p is, and 1 + (p-1)/(pv) interleaved."""
    shape = gpt("175B", 96, 12288, 96)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    layout = Layout.parse(f"tp=8,pp=8,schedule={schedule},virtual={virtual}")
    found = ledger(shape, Training(SEQUENCE, 64), Strategy(layout, 1, "selective"), MEGATRON_2022)[
        0
    ]
    wanted = first_stage_bytes(
        SEQUENCE, 1, 12288, 96, 96,
        tensor=8, stages=8, virtual=virtual, recompute="selective",
    )  # fmt: skip
    names = ("attention", "feed_forward", "norms", "dropout", "hidden states")
    held = sum(found.activations.get(name, 0) for name in names)
    # One layer's last operators are through when its backward is fullest.
    assert held == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("stage", "wanted"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_table_of_zero(stage: int, wanted: float) -> None:
    """Figure 1: 7.5 billion parameters on 64 ranks, K = 12."""
    assert zero_bytes(7.5e9, 64, stage) / 1e9 == pytest.approx(wanted, abs=0.05)


def test_zero_has_no_stage_4() -> None:
    with pytest.raises(PlanError, match="no ZeRO stage 4; use 0, 1, 2 or 3"):
        zero_bytes(1.0, 8, 4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_follow_the_table(stage: int) -> None:
    shape = gpt("7.5B", 36, 4096, 32)
    layout = Layout(dp_shard=64, zero=stage) if stage else Layout(dp_replicate=64)  # type: ignore[arg-type]
    found = of(shape, layout, ZERO)
    whole = of(shape, Layout(dp_replicate=64), ZERO).parameters // 2
    # Each rank's share is rounded up.
    assert found.states == pytest.approx(zero_bytes(whole, 64, stage), abs=16)


def of(shape: ModelShape, layout: Layout, software: Software) -> Ledger:
    (found,) = ledger(shape, Training(SEQUENCE, 64), Strategy(layout, 1), software)
    return found


def test_sgd_has_one_moment_and_fp32_no_masters() -> None:
    strategy = Strategy(Layout(), 1)
    (adam,) = ledger(GPT, Training(SEQUENCE, 1), strategy, ZERO)
    (sgd,) = ledger(GPT, Training(SEQUENCE, 1, optimizer="sgd"), strategy, ZERO)
    (wide,) = ledger(GPT, Training(SEQUENCE, 1, compute="fp32"), strategy, ZERO)
    assert sgd.optimizer * 2 == adam.optimizer == 4 * adam.parameters
    assert wide.masters == 0 and wide.parameters == wide.gradients == 2 * adam.parameters


def test_stages_are_even_where_the_software_has_them_so() -> None:
    layout = Layout(pp=8)
    even = layers_of(GPT, SEQUENCE, 8, layout, MEGATRON_2022)
    assert {len(part) for part in even} == {6}
    wordy = gpt("wordy", 48, 6144, 64, vocabulary=256_000)  # a head that costs as much as 3 layers
    assert len(layers_of(wordy, SEQUENCE, 8, layout, Software("other"))[-1]) < 6
    told = layers_of(GPT, SEQUENCE, 2, Layout(pp=2, stage_layers=(20, 28)), MEGATRON_2022)
    assert [len(part) for part in told] == [20, 28]
