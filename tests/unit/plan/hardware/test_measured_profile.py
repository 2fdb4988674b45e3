"""A measured machine as a device and a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.catalogue import device
from fivefold.plan.hardware.measured import cluster_of, device_of, fit, half_speed
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.hardware.profile import (
    AttentionTime,
    CollectiveTime,
    Gemm,
    Profile,
    Transfer,
    own_profile,
    parse_profile,
    read_profile,
    write_profile,
)

PEAK, SMALL = 2e11, 3e7


def product(dtype: str, m: int, rate: float = PEAK, kind: str = "training") -> Gemm:
    """One that follows the curve f / (f + SMALL) below `rate` exactly."""
    flops = 2.0 * m * 512 * 512
    return Gemm(dtype=dtype, m=m, k=512, n=512, seconds=(flops + SMALL) / rate, kind=kind)  # type: ignore[arg-type]


def ring(ranks: int, size: int, latency: float = 2e-4, bandwidth: float = 1e9) -> CollectiveTime:
    """An all-reduce whose ring takes exactly what its messages do."""
    messages = 2 * (ranks - 1)
    seconds = messages * latency + messages / ranks * size / bandwidth
    return CollectiveTime(backend="gloo", op="all-reduce", ranks=ranks, bytes=size, seconds=seconds)


def measured(**changes: object) -> Profile:
    """A machine of round numbers."""
    values = {
        "name": "a box",
        "date": "2026-11-30T08:00:00Z",
        "versions": {"torch": "2.13.0"},
        "device_type": "cpu",
        "devices": 1,
        "threads": 2,
        "memory": 16e9,
        "launch": 2e-6,
        "gemm": (
            *(product("fp32", m) for m in (8, 64, 512, 1 << 20)),
            *(product("bf16", m, PEAK / 2) for m in (8, 64, 512)),
            product("fp32", 512, 5 * PEAK, kind="inference"),
        ),
        "attention": (
            AttentionTime(
                dtype="fp32", batch=1, heads=8, kv_heads=8, sequence=512, head_dim=64,
                kind="training", seconds=0.01,
            ),
        ),
        "transfers": (
            Transfer(what="read", bytes=10**9, seconds=0.05),
            Transfer(what="copy", bytes=10**9, seconds=0.1),
        ),
        "collectives": tuple(ring(2, size) for size in (4096, 1 << 20, 1 << 24)),
    }  # fmt: skip
    return Profile.model_validate(values | changes)


def test_the_device_reproduces_what_was_measured() -> None:
    found = device_of(measured())
    assert found.flops("fp32") == pytest.approx(PEAK, rel=1e-3)
    assert found.efficiency.products == 1.0
    assert found.efficiency.small == pytest.approx(SMALL, rel=0.03)
    assert found.bandwidth == 2e10 and found.efficiency.bandwidth == pytest.approx(0.5)
    attention = 3.5 * 4 * 8 * 64 * 512 * 513 / 2 / 0.01
    assert found.efficiency.attention == pytest.approx(attention / PEAK, rel=1e-3)
    assert "2026-11-30" in found.source and "2.13.0" in found.source


def test_packed_products_of_inference_are_no_peak_of_training() -> None:
    assert device_of(measured()).flops("fp32") < 1.01 * PEAK


def test_a_catalogue_device_keeps_its_sheet() -> None:
    """An H100 that reaches 600 TFLOP/s and 3 TB/s."""
    reached = (product("bf16", 1 << 20, 6e14),)
    transfers = (
        Transfer(what="read", bytes=10**9, seconds=1 / 3100),
        Transfer(what="copy", bytes=10**9, seconds=1 / 3000),
    )
    found = device_of(
        measured(catalogue="H100", device_type="cuda", gemm=reached, transfers=transfers,
                 attention=())
    )  # fmt: skip
    sheet = device("H100")
    assert found.peak == sheet.peak and found.bandwidth == sheet.bandwidth
    assert found.efficiency.products == pytest.approx(6e14 / 989.4e12, rel=1e-3)
    assert found.efficiency.bandwidth == pytest.approx(3.0 / 3.35, rel=1e-3)
    assert found.price == sheet.price


def test_a_correction_slows_kernels() -> None:
    plain, slower = device_of(measured()), device_of(measured(corrections={"step": 1.25}))
    for field in ("products", "attention", "bandwidth"):
        fast, slow = getattr(plain.efficiency, field), getattr(slower.efficiency, field)
        assert slow == pytest.approx(fast / 1.25)


def test_links_are_fitted() -> None:
    link = cluster_of(measured()).inside
    assert link.latency == pytest.approx(2e-4, rel=1e-6)
    assert link.rate == pytest.approx(1e9, rel=1e-6)


def test_groups_of_several_sizes_agree() -> None:
    times = tuple(ring(n, size) for n in (2, 4, 8) for size in (4096, 1 << 20, 1 << 24))
    link = cluster_of(measured(collectives=times)).inside
    assert link.latency == pytest.approx(2e-4) and link.rate == pytest.approx(1e9)


def test_fits_of_little_or_odd_data() -> None:
    assert fit([]) is None
    assert fit([(2.0, 1e6, 1e-3)]) == (0.0, 1e9)
    # Larger messages that are faster: what each end says, not a negative latency.
    latency, bandwidth = fit([(2.0, 1e3, 1e-3), (2.0, 1e6, 1.2e-3), (2.0, 1e7, 1.1e-3)]) or (0, 0)
    assert latency > 0 and bandwidth > 0


def test_half_speed_is_the_middle_of_what_products_say() -> None:
    assert half_speed([product("fp32", m) for m in (1, 8, 64)], PEAK) == pytest.approx(SMALL)
    assert half_speed([], PEAK) == 0.0
    # One row of a matrix is bound by reading it: that says nothing of the curve.
    slow = Gemm(dtype="fp32", m=1, k=512, n=512, seconds=1.0)
    assert half_speed([slow, product("fp32", 512)], PEAK, 2e10) == pytest.approx(SMALL)
    late = product("fp32", 512).model_copy(update={"seconds": product("fp32", 512).seconds + 1e-5})
    assert half_speed([late], PEAK, 2e10, 1e-5) == pytest.approx(SMALL)


def test_this_machine(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_profile(measured(), own_profile("cpu"))
    alone, four = cluster("this"), cluster("4xthis")
    assert (alone.devices, four.devices, four.domain) == (1, 4, 4)
    # Four ranks share the cores, the memory and the way there.
    assert four.device.flops("fp32") * 4 == pytest.approx(alone.device.flops("fp32"))
    assert four.device.memory * 4 == alone.device.memory
    assert four.device.bandwidth * 4 == pytest.approx(alone.device.bandwidth)
    hosts = cluster("2x2xthis:cpu")
    assert (hosts.nodes, hosts.per_node, hosts.domain) == (2, 2, 2)
    write_profile(measured(device_type="cuda", devices=8, name="a GPU"), own_profile("cuda"))
    assert cluster("this").devices == 8
    assert cluster("4xthis").device.memory == 16e9
    assert cluster("this:cpu").device.name == "a box"


def test_a_profile_file_and_a_cluster_file_that_refers_to_it(tmp_path: Path) -> None:
    profile = tmp_path / "box.json"
    write_profile(measured(), profile)
    assert cluster(str(profile)).device.name == "a box"
    described = tmp_path / "lab.yaml"
    described.write_text(
        "nodes: 2\nper_node: 1\ndevice: {profile: box.json, price: 0.1}\n"
        "inside: {bandwidth: 1GB/s, latency: 1ms}\nbetween: {bandwidth: 1Gb/s, latency: 2ms}\n"
        "host: {bandwidth: 10GB/s, latency: 1us}\n"
    )
    found = cluster(str(described))
    assert found.device.flops("fp32") == pytest.approx(PEAK, rel=1e-3)
    assert found.device.price == 0.1 and found.between.bandwidth == 125e6


def test_a_profile_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "box.json"
    write_profile(measured(corrections={"step": 1.1}), path)
    assert read_profile(path) == measured(corrections={"step": 1.1})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"memory": None}, "`memory` of the hardware profile box.json"),
        ({"gemm": []}, "0 matrix products"),
        ({"gemm": [{"dtype": "fp32"}]}, "`gemm.0.m`"),
        ({"format": 9}, "format 9"),
        ({"devices": 0}, "`devices`"),
    ],
)
def test_a_profile_that_is_wrong_names_the_field(change: dict, told: str) -> None:
    found = json.loads(measured().model_dump_json()) | change
    with pytest.raises(PlanError) as error:
        parse_profile(found, "box.json")
    assert told in str(error.value), str(error.value)


def test_a_profile_that_is_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="fivefold bench device"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match="is no hardware profile"):
        read_profile(tmp_path / "bad.json")
    with pytest.raises(PlanError, match="no memory bandwidth"):
        device_of(measured(transfers=()))
