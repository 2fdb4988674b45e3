"""What machine this is, in the words its records and reports use."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

CPUINFO = Path("/proc/cpuinfo")


def describe_hardware(device_type: str) -> dict[str, Any]:
    """Device, cores, host memory in bytes and software: names no host, user or address."""
    found: dict[str, Any] = {
        "device": device_name(device_type),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device_type == "cuda":
        found["device_memory_bytes"] = torch.cuda.get_device_properties().total_memory
        found["devices_here"] = torch.cuda.device_count()
    return found


def device_name(device_type: str) -> str:
    """The device a rank computes on: the GPU's name, or the CPU's with its vector extension."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """Virtual machines often say only `AMD EPYC`: family and model tell generations apart."""
    facts: dict[str, str] = {}
    try:
        for line in CPUINFO.read_text("utf-8", "replace").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts and "model" in facts:
        return f"{name} family {facts['cpu family']} model {facts['model']}"
    if "CPU implementer" in facts and "CPU part" in facts:  # Arm
        return f"{name} implementer {facts['CPU implementer']} part {facts['CPU part']}"
    return name
