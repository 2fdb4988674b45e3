"""Cases whose answer is known: arithmetic by hand, and layouts that were published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.plan.communication import group
from fivefold.plan.explain.compare import differences, verdict
from fivefold.plan.explain.notes import arithmetic, notes
from fivefold.plan.search.answer import Answer, Asked, answer
from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.found import judge
from fivefold.plan.search.guess import judge_guess, parse_guess
from fivefold.plan.search.search import search
from fivefold.plan.workload import Strategy
from tests.unit.plan.search.jobs import job


def ask(guess: str, *case: object, system: str = "fivefold", **more: object) -> Answer:
    asked = job(*case, system=system, **more)  # type: ignore[arg-type]
    return answer(asked, estimators(), Asked(guess=parse_guess(guess), smaller=False))


def test_13b_on_4_x_8_a100() -> None:
    found = ask(
        "tp=4,pp=2,dp=4,micro_batch=4,schedule=1f1b", "llama-2-13b", "4x8xA100-80GB", 2048, 512
    )
    guess = found.guess
    assert guess is not None and guess.fits
    # 512 sequences over 4 data ranks, 4 at a time.
    assert guess.strategy.microbatches(found.job.training) == 32
    assert any("= 32 accumulation steps" in line for line in arithmetic(found))
    # Not the best: tensor ranks wait in every layer, and nothing forces them on a model this small.
    assert found.winner.strategy.layout.tp == 1
    assert found.winner.seconds < 0.95 * guess.seconds
    main = differences(found.winner, guess)[0]
    assert main.piece == "tp exposed" and main.why.startswith("tp=4 talks inside every layer")
    # 16 bytes a parameter: fp32 master, two moments, gradient in fp32; ZeRO-3 divides it by 32.
    lean = judge(
        found.job, Strategy(found.winner.strategy.layout, 4, "none"), estimators()
    ).fullest.states
    assert lean == pytest.approx(16 * 13.016e9 / 32, rel=0.01)


@pytest.fixture(scope="module")
def seventy() -> Answer:
    return ask("tp=8,pp=4,dp=2", "llama-3.1-70b", "8x8xH100", 4096, 512)


def test_70b_on_8_x_8_h100_keeps_tensor_ranks_in_a_node(seventy: Answer) -> None:
    assert seventy.guess is not None and seventy.guess.fits
    assert seventy.guess.seconds < 1.25 * seventy.winner.seconds
    layout = seventy.winner.strategy.layout
    assert layout.tp <= 8
    assert not group(seventy.job.cluster, layout, ("tp",)).crosses


def test_tensor_ranks_beyond_a_node_say_so(seventy: Answer) -> None:
    wide = judge_guess(seventy.job, parse_guess("tp=16,pp=2,dp=2"), estimators())
    first = differences(seventy.winner, wide)[0]
    assert first.piece == "tp exposed"
    assert first.why.startswith("TP 16 crosses the NVLink 4 domain of 8")
    assert first.share > 0.25
    assert "TP 16 crosses the NVLink 4 domain of 8" in verdict(seventy.winner, wide)


def test_on_an_nvl72_tensor_ranks_may_leave_a_tray() -> None:
    case = ("llama-3.1-70b", 4096, 512)
    rack = job(case[0], "1xNVL72", case[1], 576)
    tray = replace(
        rack, cluster=replace(rack.cluster, domain=4)
    )  # the same devices without the rack's switches
    layout = parse_guess("tp=8,pp=9,dp=1,zero=1").layout
    in_rack, in_trays = (
        judge(each, Strategy(layout, 1, "none"), estimators()) for each in (rack, tray)
    )
    assert in_trays.time.exposed["tp"] > 3 * in_rack.time.exposed["tp"]
    best = search(rack, estimators(), wanted=1, with_front=False).best[0]
    assert best.seconds <= in_rack.seconds
    assert not group(rack.cluster, best.strategy.layout, ("tp",)).crosses


@pytest.mark.slow
def test_deepseek_v3_on_2048_h800() -> None:
    case = ("deepseek-v3", "256x8xH800", 4096, 15_360)
    found = ask(
        "pp=16,dp=128,ep=64,zero=1,schedule=dualpipe", *case, system="deepseek-v3", compute="fp8"
    )
    guess = found.guess
    assert guess is not None and guess.fits
    assert guess.seconds < 1.15 * found.winner.seconds
    assert found.winner.strategy.layout.ep > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequence", "batch", "layout", "missing"),
    [
        (8192, 2048, "tp=8,pp=16,dp_shard=128", 0.0),
        # Short of it by less than what is set aside for context and fragments (estimates).
        (131_072, 128, "tp=8,cp=16,pp=16,dp_shard=8,cp_kind=gather", 2.5),
    ],
)
def test_llama_405b_on_16384_h100(sequence: int, batch: int, layout: str, missing: float) -> None:
    """Their FSDP divides gradients, too (2407.21783, section 3.3.2), which with stages is not ours."""
    asked = job("llama-3.1-405b", "2048x8xH100", sequence, batch, "megatron-core")
    best = search(asked, estimators(), wanted=1, with_front=False).best[0]
    chosen = parse_guess(f"{layout},zero=2,schedule=interleaved,virtual=4").layout
    published = judge(asked, Strategy(chosen, 1, "none"), estimators())
    assert published.room >= -missing * 2**30
    assert judge(asked, Strategy(chosen, 1, "full"), estimators()).fits
    assert published.seconds < 1.3 * best.seconds
    assert 0.35 < published.time.mfu < 0.45  # 41 % and 38 % were measured


def test_a_thin_margin_is_said_with_a_way_out() -> None:
    found = ask("dp=8", "llama-3.1-8b", "8xA100-40GB", 4096, 256)
    winner = found.winner
    text = " ".join(notes(found))
    assert (winner.room < 0.05 * winner.job.cluster.device.memory) == ("thin margin" in text)
