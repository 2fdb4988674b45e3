"""Peaks are measured once, by one process at a time, and never disturb a run's random numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.core.errors import ConfigError
from fivefold.observe import measurement_cache, peak
from fivefold.observe.hardware import describe_hardware, device_name
from fivefold.observe.measurement_cache import remembered
from fivefold.observe.peak import measured_bandwidth, measured_peak
from fivefold.observe.timing import Timing

KEY = {"what": "test", "device": "this"}


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, short measurements, and no doubt about other processes on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peak, "GEMM_SECONDS", 0.05)
    monkeypatch.setattr(peak, "BANDWIDTH_SECONDS", 0.01)
    monkeypatch.setattr(peak, "CPU_BYTES", 2**24)
    monkeypatch.setattr(peak, "CPU_SIZES", ((128,) * 3, (256, 128, 256)))
    monkeypatch.setattr(peak, "UNDISTURBED", 0.0)
    return tmp_path / "fivefold" / "measurements"


def counting(value: dict[str, Any]) -> tuple[Callable[[], dict[str, Any]], list[int]]:
    calls: list[int] = []

    def measure() -> dict[str, Any]:
        calls.append(1)
        return value

    return measure, calls


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_peak_is_measured_once(dtype: str, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured_peak("cpu", dtype)
    assert first.flops_per_second > 1e8 and first.dtype == dtype
    assert first.measured_on == device_name("cpu") and first.threads == torch.get_num_threads()
    monkeypatch.setattr(peak, "_measure_gemm", lambda *_: pytest.fail("measured again"))
    assert measured_peak("cpu", dtype) == first


def test_a_low_format_is_never_below_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fp32": 100e9, "bf16": 5e9, "fp16": 300e9}

    def measure(device_type: str, dtype: str) -> dict[str, Any]:
        return {
            "flops_per_second": rates[dtype], "dtype": dtype, "reached_in": dtype,
            "measured_on": "x", "threads": 1, "torch_version": "2", "disturbed": False,
        }  # fmt: skip

    monkeypatch.setattr(peak, "_measure_gemm", measure)
    found = {dtype: measured_peak("cpu", dtype) for dtype in rates}
    assert found["bf16"].flops_per_second == 100e9
    assert (found["bf16"].dtype, found["bf16"].reached_in) == ("bf16", "fp32")
    assert found["fp16"].flops_per_second == 300e9 and found["fp16"].reached_in == "fp16"


def test_bandwidth_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured_bandwidth()
    assert first.bytes_per_second > 1e8
    monkeypatch.setattr(peak, "_measure_reads", lambda *_: pytest.fail("measured again"))
    assert measured_bandwidth() == first


def test_another_thread_count_is_another_machine(quick: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = measured_peak("cpu", "fp32")
        torch.set_num_threads(2)
        assert measured_peak("cpu", "fp32").threads == 2 and one.threads == 1
    finally:
        torch.set_num_threads(threads)
    assert len(list(quick.glob("gemm-*.json"))) == 2


def test_measuring_draws_no_random_number() -> None:
    """A run that measures must go on bit for bit like one that finds the cache."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measured_peak("cpu", "bf16")
    measured_bandwidth()
    assert torch.equal(torch.get_rng_state(), before)


def test_measuring_is_allowed_in_a_deterministic_run() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert measured_peak("cpu", "fp32").flops_per_second > 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_disturbed_measurement_is_not_kept(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "UNDISTURBED", 1e9)
    assert measured_peak("cpu", "fp32").disturbed
    assert not list(quick.glob("*.json"))


def test_on_a_busy_machine_a_core_counts_by_the_time_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wall time may be anything there; a peak of one per cent of the truth is an MFU of 1000%."""
    monkeypatch.setattr(peak, "ESTIMATE_SECONDS", 0.03)
    estimate = measured_peak("cpu", "fp32").flops_per_second
    monkeypatch.setattr(peak, "UNDISTURBED", 1e9)
    monkeypatch.setattr(peak, "best_timing", lambda *_: Timing(seconds=100.0, cores=0.1))
    threads = torch.get_num_threads()
    monkeypatch.setattr(peak, "_key", lambda what, device: {"what": what, "device": device})
    busy = measured_peak("cpu", "fp32")
    assert busy.disturbed and busy.flops_per_second > 0.2 * estimate
    assert torch.get_num_threads() == threads


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="no peak for number format 'bf61'; did you mean 'bf16'"):
        measured_peak("cpu", "bf61")


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"key": {}}', b'{"key": {"what": "other"}, "value": {}}'],
)
def test_a_damaged_cache_is_measured_over(quick: Path, damage: bytes) -> None:
    measure, calls = counting({"rate": 1.0})
    remembered(KEY, measure, worth_keeping=lambda _: True)
    (path,) = quick.glob("*.json")
    path.write_bytes(damage)
    assert remembered(KEY, measure, worth_keeping=lambda _: True) == {"rate": 1.0}
    assert len(calls) == 2 and json.loads(path.read_text())["key"] == KEY
    assert not list(quick.glob("*.partial"))


def test_a_cache_that_cannot_be_made_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measure, calls = counting({"rate": 2.0})
    for _ in range(2):
        assert remembered(KEY, measure, worth_keeping=lambda _: True) == {"rate": 2.0}
    assert len(calls) == 2


ASKING = """
import sys, time
from pathlib import Path
from fivefold.observe.measurement_cache import remembered

folder = Path(sys.argv[1])

def measure():
    with (folder / "log").open("a") as file:
        file.write("measured\\n")
    time.sleep(0.3)
    return {"rate": 1.0}

while not (folder / "go").exists():
    time.sleep(0.001)
key = {"what": "test", "device": "this"}
assert remembered(key, measure, worth_keeping=lambda _: True) == {"rate": 1.0}
"""


def test_processes_that_ask_at_once_measure_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKING, str(tmp_path)]
    asking = [subprocess.Popen(command) for _ in range(4)]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    assert [process.wait() for process in asking] == [0, 0, 0, 0]
    assert (tmp_path / "log").read_text() == "measured\n"


def test_a_stuck_holder_of_the_lock_is_not_waited_for(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(measurement_cache, "LOCK_SECONDS", 0.2)
    quick.mkdir(parents=True)
    with (quick / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        measure, calls = counting({"rate": 1.0})
        assert remembered(KEY, measure, worth_keeping=lambda _: True) == {"rate": 1.0}
    assert len(calls) == 1


def test_hardware_is_described_without_naming_the_host() -> None:
    import socket

    found = describe_hardware("cpu")
    assert found["device"] == device_name("cpu") and found["cores"] >= 1
    assert found["host_memory_bytes"] > 2**28 and found["torch"] == torch.__version__
    assert socket.gethostname() not in json.dumps(found)
