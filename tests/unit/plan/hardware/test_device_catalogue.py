"""Devices by name, and that each says where its figures are from."""

from __future__ import annotations

import pytest

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.catalogue import ALIASES, DEVICES, device
from fivefold.plan.hardware.mig import PARTITIONS
from fivefold.plan.hardware.prices import PRICES
from fivefold.plan.hardware.servers import SERVERS

WANTED = (
    "V100", "A100-40GB", "A100-80GB", "H100", "H100-PCIe", "H800", "H20", "H200", "B200", "B300",
    "GB200", "GB300", "GH200", "MI300X", "L40S", "A10", "RTX4090",
)  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_every_wanted_device_is_there_with_its_sources(name: str) -> None:
    found = DEVICES[name]
    assert found.source and found.notes["memory"] and found.efficiency.source
    assert found.watts > 0 and found.memory > 2**34 and found.bandwidth > 1e11
    server = SERVERS[name]
    assert server.source and server.inside.source and server.between.source and server.host.source
    if found.price is not None:
        assert "20" in found.notes["price"]  # a date, or a release of a price list


def test_tables_name_devices_that_there_are() -> None:
    for table in (SERVERS, PRICES, PARTITIONS):
        assert set(table) <= set(DEVICES)
    assert set(SERVERS) == set(DEVICES)
    assert set(ALIASES.values()) <= set(DEVICES)


@pytest.mark.parametrize("found", DEVICES.values(), ids=lambda each: each.name)
def test_figures_hang_together(found) -> None:
    peak = found.peak
    assert peak["fp16"] >= peak["fp32"]
    if "fp8" in peak:  # twice the rate of 16 bits
        assert peak["fp8"] == pytest.approx(2 * peak["bf16"], rel=0.02)
    # A device of these times has some hundred operations for a byte.
    assert 30 < peak["fp16"] / found.bandwidth < 420
    assert found.spot_price is None or found.price is None or found.spot_price < found.price


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "H100"), ("H100-80GB", "H100"), ("NVIDIA H100 SXM5 80GB", "H100"),
        ("a100", "A100-80GB"), ("A100 40GB", "A100-40GB"), ("A100-SXM4-80GB", "A100-80GB"),
        ("h100 pcie", "H100-PCIe"), ("rtx 4090", "RTX4090"), ("AMD Instinct MI300X", "MI300X"),
        ("gb200-nvl72", "GB200"), ("4090", "RTX4090"), ("h100_sxm", "H100"),
        # As CUDA and ROCm call them.
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-32GB", "V100"), ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"), ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA H20", "H20"),
    ],
)  # fmt: skip
def test_spellings(text: str, name: str) -> None:
    assert device(text).name == name


def test_data_sheet_figures() -> None:
    assert device("A100-80GB").flops("bf16") == 312e12
    assert device("H100").flops("bf16") == 989.4e12
    assert device("H100").bandwidth == 3.35e12
    assert device("H800").flops("bf16") == device("H100").flops("bf16")
    assert SERVERS["H800"].inside.bandwidth * 2 == 400e9
    assert SERVERS["A100-80GB"].between.bandwidth == 25e9
    assert SERVERS["GB200"].domain == 72


def test_a_part_of_a_device() -> None:
    whole, part = device("H100"), device("H100-80GB:3g.40gb")
    assert part.name == "H100:3g.40gb"
    assert part.memory == whole.memory / 2 and part.bandwidth == whole.bandwidth / 2
    assert part.flops("bf16") == pytest.approx(whole.flops("bf16") * 60 / 132)
    assert part.price == pytest.approx(whole.price * 3 / 7)
    seven = device("h100:7g.80gb")
    assert seven.memory == whole.memory and seven.flops("fp8") == whole.flops("fp8")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("H101", "H100"),
        ("A100-90GB", "A100-80GB"),
        ("B30", "B300"),
        ("mi30x", "MI300X"),
        ("abacus", "known: V100"),
        ("A10:1g.5gb", "cannot be parted"),
        ("H100:5g.50gb", "known: 1g.10gb"),
        ("H100:3g.41gb", "3g.40gb"),
    ],
)
def test_an_unknown_device_lists_the_close_ones(text: str, told: str) -> None:
    with pytest.raises(PlanError) as error:
        device(text)
    assert told in str(error.value)


def test_a_format_that_a_device_lacks() -> None:
    with pytest.raises(PlanError, match="V100 has no products in bf16"):
        device("V100").flops("bf16")
