"""All measurements of this machine, as the profile that plans read."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil
import torch

from fivefold import __version__
from fivefold.core.errors import PlanError
from fivefold.kernels.dispatch import low_precision_gemm_is_native
from fivefold.observe.hardware import device_name, usable_cores
from fivefold.observe.peak import FORMATS, UNDISTURBED
from fivefold.observe.timing import Timing
from fivefold.plan.calibrate.attention import measure_attention
from fivefold.plan.calibrate.collectives import group_sizes, measure_collectives
from fivefold.plan.calibrate.memory import measure_launch, measure_transfers
from fivefold.plan.calibrate.products import measure_products
from fivefold.plan.hardware.catalogue import device as catalogue_device
from fivefold.plan.hardware.profile import CollectiveTime, Profile

Say = Callable[[str], None]


@dataclass
class Disturbance:
    """Whether other processes took cores while timings were taken."""

    cores: int
    disturbed: int = 0
    seen: int = 0

    def watch(self, timing: Timing) -> None:
        """Count a timing."""
        self.seen += 1
        self.disturbed += timing.cores < UNDISTURBED * self.cores and timing.seconds > 1e-3

    @property
    def is_bad(self) -> bool:
        """More than a tenth of all timings."""
        return self.disturbed > 0.1 * self.seen


def measure_device(
    device: str,
    formats: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    budget: float = 0.15,
    say: Say = lambda _: None,
) -> Profile:
    """Measure the `cpu` or `cuda` device of this process; `budget` seconds for each timing.

    formats: fp32, bf16, fp16; by default those that are of use here. ranks: sizes of groups for
    collectives; by default powers of two up to the devices (or cores). `say` hears what comes next.
    Raises PlanError where there is no such device.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise PlanError(f"there is no device {device!r} here", "try --device cpu")
    formats = tuple(formats or _useful(device))
    for form in formats:
        if form not in FORMATS:
            raise PlanError(f"{form!r} is not measured", f"known: {', '.join(FORMATS)}")
    disturbance = Disturbance(
        min(torch.get_num_threads(), usable_cores()) if device == "cpu" else 0
    )
    say("matrix products")
    products = measure_products(device, formats, budget, disturbance.watch)
    say("attention")
    attention = measure_attention(device, formats, budget, disturbance.watch)
    say("memory")
    transfers = measure_transfers(device, budget, disturbance.watch)
    launch = measure_launch(device, budget)
    times: list[CollectiveTime] = []
    for size in group_sizes(device) if ranks is None else [n for n in ranks if n > 1]:
        say(f"collectives of {size}")
        times += measure_collectives(device, size, budget)
    return Profile(
        name=device_name(device),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=_versions(device),
        device_type=device,  # type: ignore[arg-type]
        devices=torch.cuda.device_count() if device == "cuda" else 1,
        threads=torch.get_num_threads(),
        memory=_memory(device),
        catalogue=_catalogue_name(device),
        launch=launch,
        gemm=products,
        attention=attention,
        transfers=transfers,
        collectives=tuple(times),
        disturbed=disturbance.is_bad,
    )


def _useful(device: str) -> tuple[str, ...]:
    """fp32 and bf16; of a GPU fp16 too, and bf16 of those alone that have it."""
    if device == "cpu":
        return ("fp32", "bf16")
    formats = [
        form for form in ("bf16", "fp16") if low_precision_gemm_is_native("cuda", FORMATS[form])
    ]
    return ("fp32", *formats)


def _memory(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.get_device_properties().total_memory)
    return float(psutil.virtual_memory().total)


def _catalogue_name(device: str) -> str | None:
    """The catalogue's name of this GPU, where its own name is one of its spellings."""
    if device == "cpu":
        return None
    try:
        return catalogue_device(device_name(device)).name
    except PlanError:
        return None


def _versions(device: str) -> dict[str, str]:
    found = {
        "fivefold": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
