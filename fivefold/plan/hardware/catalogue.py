"""Devices by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.catalogue_amd import AMD
from fivefold.plan.hardware.catalogue_blackwell import BLACKWELLS
from fivefold.plan.hardware.catalogue_nvidia import NVIDIA
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.mig import part

DEVICES: Mapping[str, Device] = {each.name: each for each in (*NVIDIA, *BLACKWELLS, *AMD)}

# Other spellings, in the form that `_plain` gives.
ALIASES: Mapping[str, str] = {
    "v10032gb": "V100", "v100sxm2": "V100", "v100sxm232gb": "V100", "v100sxm216gb": "V100-16GB",
    "a100": "A100-80GB", "a10040": "A100-40GB", "a10080": "A100-80GB", "a100sxm": "A100-80GB",
    "a100sxm4": "A100-80GB", "a100sxm440gb": "A100-40GB", "a100sxm480gb": "A100-80GB",
    "a100sxm80gb": "A100-80GB", "a100sxm40gb": "A100-40GB", "a100pcie80gb": "A100-PCIe",
    "a10080gbpcie": "A100-PCIe", "a80080gb": "A800", "a800sxm480gb": "A800", "a10g": "A10",
    "a1024gb": "A10",
    "h10080gb": "H100", "h100sxm": "H100", "h100sxm5": "H100", "h10080": "H100",
    "h100sxm80gb": "H100", "h100sxm580gb": "H100", "h100pcie80gb": "H100-PCIe",
    "h10080gbpcie": "H100-PCIe", "h80080gb": "H800", "h800sxm": "H800", "h2096gb": "H20",
    "h20sxm": "H20", "h200sxm": "H200", "h200141gb": "H200", "gh20096gb": "GH200",
    "gh200480gb": "GH200", "gh200120gb": "GH200",
    "b200sxm": "B200", "b200180gb": "B200", "b300sxm": "B300", "b300sxm6ac": "B300",
    "gb200nvl72": "GB200", "nvl72": "GB200", "gb300nvl72": "GB300", "gb200sxm": "GB200",
    "mi300x192gb": "MI300X", "mi300": "MI300X", "l40s48gb": "L40S", "l424gb": "L4",
    "4090": "RTX4090", "rtx409024gb": "RTX4090",
}  # fmt: skip


def device(name: str) -> Device:
    """`H100`, `a100-40gb`, `RTX 4090`, or a part of one: `H100-80GB:3g.40gb`.

    Raises PlanError for an unknown name, listing the close ones.
    """
    whole, _, profile = name.partition(":")
    found = _find(whole)
    return part(found, profile.strip().lower()) if profile else found


def _find(name: str) -> Device:
    plain = _plain(name)
    canonical = _PLAIN_NAMES.get(plain) or ALIASES.get(plain)
    if canonical is None:
        raise PlanError(f"there is no device {name.strip()!r} in the catalogue", close_names(name))
    return DEVICES[canonical]


def close_names(name: str) -> str:
    """A mend that lists devices whose names look like `name`; all of them where none does."""
    plain = _plain(name)
    names = {**_PLAIN_NAMES, **ALIASES}
    spelled = difflib.get_close_matches(plain, list(names), n=6, cutoff=0.6)
    letters, digits = re.match(r"[a-z]*", plain), re.findall(r"\d{2,}", plain)
    series = (letters[0] if letters else "") + (digits[0][:2] if digits else "")
    same = [each for each in names if len(series) > 1 and each.startswith(series)]
    close = list(dict.fromkeys(names[each] for each in (*spelled, *same)))[:4]
    if close:
        return f"close are {', '.join(close)}"
    return f"known: {', '.join(DEVICES)}; or describe it in a YAML file"


def _plain(name: str) -> str:
    """Letters and digits, without the maker's name and the kind of memory."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    plain = re.sub(r"hbm\d?e?", "", plain)
    return re.sub(r"^(nvidia|amd|instinct|tesla|geforce)+", "", plain)


_PLAIN_NAMES = {_plain(each): each for each in DEVICES}
