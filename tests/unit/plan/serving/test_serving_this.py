"""A measured processor as it serves: curves by rows, streaming of weights, reading of caches."""

from __future__ import annotations

import pytest

from fivefold.plan.hardware.measured import cluster_of
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.hardware.profile import AttentionTime, Gemm, Profile, Transfer
from fivefold.plan.models.parse import shape
from fivefold.plan.serving.step import decode_step, prefill
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.serving.this import MeasuredDevice, as_measured, serving_device, with_curves


def gemm(m: int, k: int, n: int, rate: float, kind: str = "inference") -> Gemm:
    seconds = 2 * m * k * n / rate
    return Gemm(dtype="bf16", m=m, k=k, n=n, seconds=seconds, kind=kind)  # type: ignore[arg-type]


PROFILE = Profile(
    name="a box",
    date="2026-11-30T00:00:00+00:00",
    versions={},
    device_type="cpu",
    devices=1,
    threads=2,
    memory=64e9,
    launch=2e-6,
    gemm=(
        gemm(1, 1024, 1024, 20e9),  # 2 MiB of weights in a ten thousandth of a second: 20 GB/s
        gemm(8, 1024, 1024, 90e9),
        gemm(128, 1024, 1024, 120e9),
        gemm(8, 1024, 1024, 8e9, "training"),
    ),
    attention=(
        AttentionTime(dtype="bf16", batch=1, heads=9, kv_heads=3, sequence=512, head_dim=64,
                      kind="decode", seconds=2 * 512 * 3 * 64 * 2 / 10e9),
        AttentionTime(dtype="bf16", batch=1, heads=9, kv_heads=3, sequence=512, head_dim=64,
                      kind="forward", seconds=4 * 9 * 64 * 512 * 513 / 2 / 50e9),
    ),
    transfers=(Transfer(what="read", bytes=10**9, seconds=1 / 34),
               Transfer(what="copy", bytes=10**9, seconds=1 / 20)),
)  # fmt: skip


def box() -> MeasuredDevice:
    found = serving_device(cluster_of(PROFILE).device, PROFILE)
    assert isinstance(found, MeasuredDevice)
    return found


def test_rates_lie_between_those_measured() -> None:
    found = box()
    assert [found.rate("bf16", m, 2.0**20) for m in (1, 8, 128, 4096)] == pytest.approx(
        [90e9, 90e9, 120e9, 120e9]
    )
    assert 90e9 < found.rate("bf16", 32, 2.0**20) < 120e9


def test_rates_lie_between_those_of_smaller_and_larger_matrices() -> None:
    two = (*PROFILE.gemm[:3], gemm(2, 4096, 4096, 16e9), gemm(128, 4096, 4096, 60e9))
    found = serving_device(cluster_of(PROFILE).device, PROFILE.model_copy(update={"gemm": two}))
    assert isinstance(found, MeasuredDevice)
    rates = [found.rate("bf16", 128, n) for n in (1e3, 2.0**20, 2.0**22, 2.0**24, 1e12)]
    assert rates == pytest.approx([120e9, 120e9, 90e9, 60e9, 60e9])
    # Eight of the 128 rows take the first two rows' time and a share of what the others add.
    first, last = 2 * 2 * 4096**2 / 16e9, 128 * 2 * 4096**2 / 60e9
    wanted = 8 * 2 * 4096**2 / (first + 6 / 126 * (last - first))
    assert found.rate("bf16", 8, 2.0**24) == pytest.approx(wanted)


def test_weights_stream_as_products_of_one_row_read_them() -> None:
    found = box()
    assert found.bandwidth == pytest.approx(20e9)
    assert found.reading == pytest.approx(10e9)
    assert found.scoring == pytest.approx(50e9)
    some = PROFILE.model_copy(update={"gemm": PROFILE.gemm[1:3]})
    other = serving_device(cluster_of(some).device, some)
    assert other.bandwidth == pytest.approx(34e9)


def test_steps_of_a_small_model() -> None:
    """135M in bf16: 0.25 GiB over 20 GB/s for one answer; of a prompt, its operations."""
    small = shape("layers=30,hidden=576,heads=9,kv=3,intermediate=1536,vocabulary=49152,tied=1")
    here = with_curves(cluster_of(PROFILE), PROFILE)
    strategy = ServingStrategy()
    parameters = 30 * (2 * 576 * 64 * 12 + 3 * 576 * 1536) + 576 * 49_152
    step = decode_step(small, strategy, here, 1, 1)
    assert step - strategy.system.host == pytest.approx(2 * parameters / 20e9, rel=0.03)
    layers = 2 * 512 * (parameters - 576 * 49_152)
    pairs = 512 * 513 / 2 * 4 * 9 * 64 * 30
    read = prefill(small, strategy, here, 512)
    assert read == pytest.approx(layers / 120e9 + pairs / 50e9, rel=0.1)


def test_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    plain = PROFILE.model_copy(update={"gemm": PROFILE.gemm[-1:]})
    device = cluster_of(plain).device
    assert serving_device(device, plain) is device
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    h100 = cluster("8xH100")
    assert as_measured(h100) is h100
