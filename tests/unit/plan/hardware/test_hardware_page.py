"""docs/plan-hardware.md says what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from fivefold.plan.hardware.catalogue import DEVICES
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.hardware.servers import SERVERS

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "plan-hardware.md").read_text("utf-8")


def row(name: str) -> str:
    device, server = DEVICES[name], SERVERS[name]
    half = device.peak.get("bf16", device.peak["fp16"]) / 1e12
    fp8 = f"{device.peak['fp8'] / 1e12:.0f}" if "fp8" in device.peak else ""
    cells = [
        name, f"{half:.0f}", fp8, f"{device.memory / 2**30:.1f}", f"{device.bandwidth / 1e12:.2f}",
        f"{device.watts:.0f}", str(server.domain), f"{server.inside.bandwidth / 1e9:.0f}",
        re.sub(r"\.0$", "", f"{server.between.bandwidth / 1e9:.1f}"),
    ]  # fmt: skip
    return re.sub(r"\|  \|", "| |", f"| {' | '.join(cells)} |")


def test_the_table_is_the_catalogue() -> None:
    missing = [row(name) for name in DEVICES if row(name) not in PAGE]
    assert not missing, "\n".join(missing)


def test_devices_without_a_price_are_those_that_are_named() -> None:
    for name, device in DEVICES.items():
        named = re.search(r"Devices that are not rented.*?no cost", PAGE, re.DOTALL)
        assert named is not None
        assert (device.price is None) == (re.search(rf"\b{name}\b", named[0]) is not None), name


def test_its_files_are_clusters(tmp_path: Path) -> None:
    files = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(files) == 2
    for text in files:
        path = tmp_path / "lab.yaml"
        path.write_text(text)
        found = cluster(str(path))
        assert found.device.price is not None and found.domain == 8
