"""Clusters from words and files."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.cluster_file import LinkPart
from fivefold.plan.hardware.link import Link
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.hardware.quantity import quantity
from fivefold.plan.hardware.servers import SERVERS


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "domain"),
    [
        ("8x8xH100", 8, 8, 8),
        ("8 x 8 x h100", 8, 8, 8),
        ("64xH100", 8, 8, 8),
        ("4xH100", 1, 4, 4),
        ("H100", 1, 1, 1),
        ("2x4xA100-80GB", 2, 4, 4),
        ("18x4xGB200", 18, 4, 72),
        ("36x4xGB200", 36, 4, 72),
        ("8x4xGB200", 8, 4, 32),
        ("2xNVL72", 36, 4, 72),
        ("1xGB300-NVL72", 18, 4, 72),
        ("1x16xV100", 1, 16, 16),
        ("256xGH200", 256, 1, 1),
        ("2048xH800", 256, 8, 8),
        ("1x8xMI300X", 1, 8, 8),
        ("8xRTX4090", 1, 8, 8),
    ],
)
def test_words(text: str, nodes: int, per_node: int, domain: int) -> None:
    found = cluster(text)
    assert (found.nodes, found.per_node, found.domain) == (nodes, per_node, domain)
    server = SERVERS[found.device.name]
    assert (found.inside, found.between, found.host) == (server.inside, server.between, server.host)
    assert found.failures == pytest.approx(1.97e-5, rel=0.01)


def test_how_groups_lie_on_a_rack() -> None:
    rack = cluster("18x4xGB200")
    assert rack.spread(8, 1) == (8, 1) and rack.spread(72, 1) == (72, 1)
    servers = cluster("8x8xH100")
    assert servers.spread(16, 1) == (8, 2) and servers.spread(8, 8) == (1, 8)


def test_parts_of_a_device_are_no_domain() -> None:
    found = cluster("1x7xH100:1g.10gb")
    assert found.domain == 1 and found.inside.name.startswith("PCIe")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("8x8xH101", "close are H100"),
        ("8x8", "nodes x devices x name"),
        ("", "nodes x devices x name"),
        ("0x8xH100", "no devices"),
        ("12xH100", "use 8xH100"),
        ("8x16xH100", "use 16x8xH100"),
        ("there.yaml", "cannot read the cluster file there.yaml"),
        ("this:tpu", "use this, this:cpu or this:cuda"),
    ],
)
def test_what_is_no_cluster(text: str, told: str) -> None:
    with pytest.raises(PlanError) as error:
        cluster(text)
    assert told in str(error.value)


def test_this_machine_must_be_measured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        PlanError, match="not been measured; measure it with `fivefold bench device`"
    ):
        cluster("this")


WHOLE = """
name: lab
nodes: 4
per_node: 8
domain: 8
device:
  name: Chip
  peak: {bf16: 500 TFLOP/s, fp8: 1e15}
  memory: 96GiB
  bandwidth: 3.2TB/s
  watts: 500
  price: 2.5
  efficiency: EFFICIENCY
inside: {bandwidth: 300GB/s, latency: 2us, efficiency: 0.8}
between: {bandwidth: 200Gb/s, latency: 6us}
host: {bandwidth: 32GB/s, latency: 5us}
failures: 1.0e-5
restart: 10min
"""


def whole() -> str:
    """The file with an efficiency of whatever fields there are now."""
    from dataclasses import asdict

    from fivefold.plan.hardware.catalogue import device

    return WHOLE.replace("EFFICIENCY", str(asdict(device("H100").efficiency)))


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_that_says_everything(tmp_path: Path) -> None:
    found = cluster(write(tmp_path, whole()))
    assert (found.name, found.devices, found.domain) == ("lab", 32, 8)
    assert found.device.flops("bf16") == 500e12 and found.device.flops("fp8") == 1e15
    assert found.device.memory == 96 * 2**30 and found.device.bandwidth == 3.2e12
    assert found.between.bandwidth == 25e9 and found.between.latency == 6e-6
    assert (found.failures, found.restart) == (1e-5, 600.0)
    assert found.device.price == 2.5


def test_a_file_that_changes_a_catalogue_device(tmp_path: Path) -> None:
    text = """
nodes: 16
per_node: 8
device: {like: H100, memory: 94GB, price: 4, peak: {fp8: 1.5e15}}
between: {bandwidth: 25GB/s}
"""
    found, usual = cluster(write(tmp_path, text)), cluster("16x8xH100")
    assert found.device.memory == 94e9 and found.device.price == 4
    assert found.device.flops("bf16") == usual.device.flops("bf16")
    assert found.device.flops("fp8") == 1.5e15
    assert found.inside == usual.inside
    assert found.between.bandwidth == 25e9 and found.between.latency == usual.between.latency
    assert "cluster.yaml" in found.device.source


def test_a_rack_in_a_file_has_its_domain(tmp_path: Path) -> None:
    found = cluster(write(tmp_path, "nodes: 18\nper_node: 4\ndevice: GB200\n"))
    assert found.domain == 72


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("nodes: 4\n", ""), "has no `nodes`; add nodes:"),
        (("  memory: 96GiB\n", ""), "has no `device.memory`"),
        (("  bandwidth: 3.2TB/s\n", ""), "has no `device.bandwidth`"),
        (("latency: 6us", "efficiency: 0.5"), "has no `between.latency`"),
        (("domain: 8", "domian: 8"), "unknown field `domian`; did you mean 'domain'?"),
        (("  watts: 500", "  wats: 500"), "unknown field `device.wats`; did you mean 'watts'?"),
        (("3.2TB/s", "fast"), "`device.bandwidth`"),
        (("96GiB", "96 parsecs"), "unknown unit 'parsecs'"),
        (("nodes: 4", "nodes: many"), "`nodes` of"),
        (("domain: 8", "domain: 64"), "more than its 32 devices"),
        (("domain: 8", "domain: 3"), "nodes of 8 do not divide into"),
        (("per_node: 8", "pernode: 8"), "unknown field `pernode`; did you mean 'per_node'?"),
        (("efficiency: 0.8}", "efficiency: 8}"), "`inside.efficiency` of"),
        (("  name: Chip", "  like: H101"), "close are H100"),
    ],
)
def test_a_file_that_is_wrong_names_the_field(tmp_path: Path, change, told: str) -> None:
    text = whole()
    assert change[0] in text
    with pytest.raises(PlanError) as error:
        cluster(write(tmp_path, text.replace(*change)))
    assert told in str(error.value), str(error.value)


def test_a_file_can_say_all_of_a_link() -> None:
    said = {"name", "source"} | set(LinkPart.model_fields)
    assert said == {field.name for field in fields(Link)}


@pytest.mark.parametrize("text", ["- a list", "a: [", "\x00"])
def test_a_file_that_is_no_cluster(tmp_path: Path, text: str) -> None:
    with pytest.raises(PlanError, match=r"cluster\.yaml"):
        cluster(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("450GB/s", 450e9), ("400Gb/s", 50e9), ("80 GiB", 80 * 2**30), ("989 TFLOP/s", 989e12),
        ("3us", 3e-6), ("1.5 ms", 1.5e-3), ("1e12", 1e12), ("2_000", 2000.0), ("1.8 TB/s", 1.8e12),
        ("400 Gbit/s", 50e9), ("2h", 7200.0), ("100Gbps", 12.5e9),
    ],
)  # fmt: skip
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "GB", "12 furlongs", "1.2.3 GB"])
def test_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number|unknown unit"):
        quantity(text)
