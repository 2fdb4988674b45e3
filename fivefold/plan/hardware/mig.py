"""Parts of a device under NVIDIA's MIG: `H100-80GB:3g.40gb`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fivefold.core.errors import PlanError, nearest
from fivefold.plan.hardware.device import Device

SOURCE = "NVIDIA Multi-Instance GPU user guide, supported profiles"


@dataclass(frozen=True)
class Partitions:
    """Profiles of a device: name to (share of its multiprocessors, share of its memory).

    Memory bandwidth is divided like memory: a slice owns its channels.
    """

    profiles: dict[str, tuple[float, float]]


def _hundred(unit: int, multiprocessors: dict[int, int], of: int) -> Partitions:
    """Profiles of A100 and H100: `unit` GB of memory in each of eight slices."""
    shares = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
    profiles = {
        f"{slices}g.{unit * eighths}gb": (multiprocessors[slices] / of, eighths / 8)
        for slices, eighths in shares.items()
    }
    profiles[f"1g.{unit * 2}gb"] = (multiprocessors[1] / of, 2 / 8)
    return Partitions(profiles)


_A100 = {1: 14, 2: 28, 3: 42, 4: 56, 7: 98}  # of 108
_H100 = {1: 16, 2: 32, 3: 60, 4: 64, 7: 132}  # of 132
_SEVENTHS = {1: 1, 2: 2, 3: 3, 4: 4, 7: 7}  # where the guide says no more than that
_H100_PARTS = _hundred(10, _H100, 132)
_B200 = {1: 18, 2: 36, 3: 70, 4: 72, 7: 148}  # of 148

PARTITIONS: dict[str, Partitions] = {
    "A100-40GB": _hundred(5, _A100, 108),
    "A100-80GB": _hundred(10, _A100, 108),
    "A100-PCIe": _hundred(10, _A100, 108),
    "A800": _hundred(10, _A100, 108),
    "H100": _H100_PARTS,
    "H100-PCIe": _hundred(10, _SEVENTHS, 7),
    "H800": _H100_PARTS,
    "H20": _hundred(12, _SEVENTHS, 7),
    "GH200": _hundred(12, _H100, 132),
    "H200": Partitions(
        {
            "1g.18gb": (16 / 132, 1 / 8), "1g.35gb": (16 / 132, 2 / 8), "2g.35gb": (32 / 132, 2 / 8),
            "3g.71gb": (60 / 132, 4 / 8), "4g.71gb": (64 / 132, 4 / 8), "7g.141gb": (1.0, 1.0),
        }
    ),
    "B200": Partitions(
        {
            "1g.23gb": (_B200[1] / 148, 1 / 8), "1g.45gb": (_B200[1] / 148, 2 / 8),
            "2g.45gb": (_B200[2] / 148, 2 / 8), "3g.90gb": (_B200[3] / 148, 4 / 8),
            "4g.90gb": (_B200[4] / 148, 4 / 8), "7g.180gb": (1.0, 1.0),
        }
    ),
}  # fmt: skip


def part(whole: Device, profile: str) -> Device:
    """The device that one instance of `profile` is. Raises PlanError for one it does not have."""
    if whole.name not in PARTITIONS:
        raise PlanError(
            f"{whole.name} cannot be parted (MIG)", nearest(whole.name, tuple(PARTITIONS))
        )
    profiles = PARTITIONS[whole.name].profiles
    if profile not in profiles:
        raise PlanError(f"{whole.name} has no MIG profile {profile!r}", _mend(profile, profiles))
    compute, memory = profiles[profile]
    slices = int(profile.partition("g")[0])
    return replace(
        whole,
        name=f"{whole.name}:{profile}",
        peak={form: rate * compute for form, rate in whole.peak.items()},
        memory=whole.memory * memory,
        bandwidth=whole.bandwidth * memory,
        watts=whole.watts * slices / 7,
        price=None if whole.price is None else whole.price * slices / 7,
        spot_price=None if whole.spot_price is None else whole.spot_price * slices / 7,
        notes={**whole.notes, "mig": f"{SOURCE}; price and watts by slices of 7"},
    )


def _mend(profile: str, profiles: dict[str, tuple[float, float]]) -> str:
    same = [name for name in profiles if re.match(rf"{re.escape(profile[:2])}", name)]
    return f"did you mean {same[0]!r}?" if len(same) == 1 else f"known: {', '.join(profiles)}"
