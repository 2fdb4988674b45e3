"""Young, Daly, published interruptions; what a run costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.plan.cost import BUILDING, SERVER, run_cost
from fivefold.plan.goodput import REPORTED, daly, goodput, on_spot, slowest, young
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models.parse import shape
from fivefold.plan.software import FIVEFOLD
from fivefold.plan.time import step_time
from fivefold.plan.workload import Strategy, Training


def test_young_and_daly() -> None:
    assert young(7200.0, 9.0) == pytest.approx(360.0)
    assert daly(7200.0, 9.0) == pytest.approx(360 * (1 + 0.025 / 3 + 0.025**2 / 9) - 9)
    assert daly(10.0, 30.0) == 10.0


def test_the_best_interval_is_best() -> None:
    servers = cluster("2048x8xH100")
    best = goodput(servers, checkpoint=20)
    for factor in (0.7, 0.9, 1.1, 1.4):
        other = goodput(servers, checkpoint=20, interval=best.interval * factor)
        assert other.share < best.share


def test_shares_add_up_and_nothing_fails_where_nothing_can() -> None:
    found = goodput(cluster("2048x8xH100"), checkpoint=30, interval=1800)
    assert found.share + found.checkpoints + found.lost + found.restarts == pytest.approx(1)
    calm = goodput(replace(cluster("8xH100"), failures=0.0), interval=99.0, checkpoint=1.0)
    assert calm.share == pytest.approx(0.99) and calm.lost == calm.restarts == 0


def test_llama_3_was_interrupted_every_three_hours_and_trained_nine_tenths_of_the_time() -> None:
    llama = REPORTED[0]
    assert llama.between(16_384) == pytest.approx(54 * 24 / 419)
    found = goodput(cluster("2048x8xH100"))
    assert found.interruptions_a_day == pytest.approx(419 / 54)
    assert 0.9 < found.share < 0.97


def test_meta_expects_its_first_cluster_to_fail_every_1_8_hours_with_16384_devices() -> None:
    rsc = next(each for each in REPORTED if each.name == "Meta RSC-1")
    assert rsc.between(16_384) == pytest.approx(1.8, abs=0.05)


def test_spot_devices_are_interrupted_more() -> None:
    servers = cluster("4x8xH100")
    assert on_spot(servers, 0.16) == pytest.approx(servers.failures + 0.02)
    assert goodput(servers, failures=on_spot(servers)).share < goodput(servers).share


def test_the_slowest_of_many() -> None:
    assert slowest(1, 0.05) == 1.0
    assert slowest(1000, 0.01) == pytest.approx(
        1.0324, abs=1e-3
    )  # tables of order statistics: 3.24


@pytest.mark.parametrize("wrong", [{"checkpoint": -1.0}, {"restart": math.inf}, {"interval": 0.0}])
def test_impossible_times_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError):
        goodput(cluster("8xH100"), **wrong)  # type: ignore[arg-type]


def test_a_run_takes_its_tokens_at_the_rate_of_a_step() -> None:
    servers = cluster("8x8xH100")
    training = Training(4096, 512, tokens=1e12)
    strategy = Strategy(Layout(tp=8, pp=4, dp_shard=2, zero=1), 2)
    step = step_time(shape("llama2-70b"), training, strategy, servers, FIVEFOLD)
    found = run_cost(step, training, servers)
    assert found.days == pytest.approx(1e12 / step.tokens_per_second / 86_400 / found.goodput.share)
    assert found.steps == pytest.approx(1e12 / (512 * 4096))
    assert found.energy == pytest.approx(found.device_hours * 0.7 * SERVER * BUILDING)
    assert found.price is None or found.dollars == pytest.approx(found.price * found.device_hours)
    assert run_cost(step, training, servers, spot=True).days > found.days
    never = run_cost(step, training, cluster("2048x8xH100"), spot=True)
    assert never.days == math.inf and never.dollars is None
    with pytest.raises(PlanError, match="give tokens"):
        run_cost(step, replace(training, tokens=None), servers)
