"""`fivefold bench device`, with little to measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.bench import bench_app
from fivefold.core.errors import PlanError
from fivefold.plan.calibrate import attention, memory, products
from fivefold.plan.calibrate.collectives import group_sizes, measure_collectives
from fivefold.plan.calibrate.measure import Disturbance, measure_device
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.hardware.profile import Profile


@pytest.fixture
def little(monkeypatch) -> None:
    monkeypatch.setattr(products, "CPU_ROWS", (1, 16))
    monkeypatch.setattr(products, "CPU_MATRICES", ((64, 96),))
    monkeypatch.setattr(products, "COLD_BYTES", 2**18)
    monkeypatch.setattr(attention, "CPU_CASES", ((1, 2, 1, 32, 16),))
    monkeypatch.setattr(attention, "CPU_CACHES", ((2, 2, 1, 32, 16),))
    monkeypatch.setattr(memory, "CPU_BYTES", 2**20)


def test_everything_is_measured(little: None) -> None:
    said: list[str] = []
    found = measure_device("cpu", ["fp32", "bf16"], ranks=[1], budget=0.001, say=said.append)
    assert said == ["matrix products", "attention", "memory"]
    shapes = {(g.dtype, g.kind, g.m) for g in found.gemm}
    assert shapes == {
        (dtype, kind, m)
        for dtype in ("fp32", "bf16") for kind in ("training", "inference") for m in (1, 16)
    }  # fmt: skip
    assert {a.kind for a in found.attention} == {"forward", "training", "decode"}
    assert {t.what for t in found.transfers} == {"read", "copy"}
    assert all(each.seconds > 0 for each in (*found.gemm, *found.attention, *found.transfers))
    assert 0 < found.launch < 1e-3 and found.memory > 2**30
    assert set(found.versions) >= {"torch", "python", "fivefold"} and found.date.endswith("Z")
    assert Profile.model_validate_json(found.model_dump_json()) == found


def test_the_command_writes_a_profile_that_plans_read(
    little: None, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["device", "--seconds", "0.001", "--ranks", "1", "--dtype", "fp32"]
    ran = CliRunner().invoke(bench_app, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    printed = json.loads(ran.stdout.strip().splitlines()[-1])
    assert printed["gemm"] and cluster("this").device.name == printed["name"]
    out = tmp_path / "box.json"
    ran = CliRunner().invoke(bench_app, [*arguments, "--out", str(out)])
    assert ran.exit_code == 0 and "attention decode" in ran.stdout
    assert cluster(str(out)).devices == 1


@pytest.mark.parametrize(
    ("device", "formats", "told"),
    [("tpu", None, "no device 'tpu'"), ("cpu", ["fp9"], "'fp9' is not measured; known: fp32")],
)
def test_what_cannot_be_measured(device: str, formats, told: str) -> None:
    with pytest.raises(PlanError) as error:
        measure_device(device, formats)
    assert told in str(error.value)


def test_shapes_that_would_take_long_are_left_out(monkeypatch) -> None:
    """A format that is emulated: the next shape would take more than ten budgets."""
    from fivefold.observe.timing import Timing

    monkeypatch.setattr(products, "CPU_ROWS", (1, 2, 1000))
    monkeypatch.setattr(products, "CPU_MATRICES", ((8, 8),))
    monkeypatch.setattr(products, "COLD_BYTES", 1)
    monkeypatch.setattr(products, "best_timing", lambda run, device, budget: Timing(budget, 1.0))
    found = products.measure_products("cpu", ["fp32"], 0.01, lambda _: None)
    assert [g.m for g in found if g.kind == "training"] == [1, 2]


def test_weights_of_inference_are_not_in_a_cache(monkeypatch) -> None:
    """Every product has another copy, until all of them are more than a cache holds."""
    import torch

    used: list[int] = []
    monkeypatch.setattr(products, "packed_linear", lambda x, packed: used.append(id(packed)))
    monkeypatch.setattr(products, "COLD_BYTES", 10 * 64 * 64 * 4)
    run = products._over_packed(torch.zeros(64, 64))
    for _ in range(20):
        run(torch.zeros(1, 64))
    assert len(set(used)) == 10 and used[:10] == used[10:]


def test_disturbance_counts_long_timings_without_cores() -> None:
    from fivefold.observe.timing import Timing

    quiet, busy = Disturbance(2), Disturbance(2)
    for _ in range(20):
        quiet.watch(Timing(0.01, 1.99))
        busy.watch(Timing(0.01, 1.0))
    assert not quiet.is_bad and busy.is_bad


def test_group_sizes_are_powers_of_two() -> None:
    assert all(size & (size - 1) == 0 and size > 1 for size in group_sizes("cpu"))


@pytest.mark.slow
def test_collectives_between_new_processes() -> None:
    found = measure_collectives("cpu", 2, 0.01, [4096])
    assert {c.op for c in found} == {
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send",
    }  # fmt: skip
    assert all(c.seconds > 0 and c.ranks == 2 and c.backend == "gloo" for c in found)
