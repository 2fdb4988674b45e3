"""The loaded native library, or why there is none.

Everything crosses the boundary as pointers, sizes and format codes. The functions here check
what C++ then takes for granted: device, format, and strides.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.kernels.cpu.build import BuildError, build, shipped

# As `enum Format` in vec.h.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class KernelError(FivefoldError):
    """Operands that a native kernel does not take."""


class _Place:
    """A library to take in place of one compiled here."""

    path: Path | None = None


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, compiled if need be; None, with one warning that says why, where it cannot be."""
    try:
        return ctypes.CDLL(str(_Place.path or _built_or_shipped()))
    except (FivefoldError, OSError) as error:
        FALLBACKS.append(str(error))
        warnings.warn(f"kernels fall back to plain torch: {error}", stacklevel=2)
        return None


def _built_or_shipped() -> Path:
    try:
        return build()
    except BuildError as error:
        came = shipped()
        if came is None:
            raise
        warnings.warn(f"kernels not made for this very CPU are used: {error}", stacklevel=2)
        return came


# Why the native kernels are not used in this process, when they are not.
FALLBACKS: list[str] = []


def is_available() -> bool:
    """Whether the native kernels can be called in this process."""
    return load() is not None


def use(path: Path) -> None:
    """Take another compiled library in this process: one under a sanitizer, or shipped with it."""
    _Place.path = path
    FALLBACKS.clear()
    load.cache_clear()
    function.cache_clear()


@functools.cache  # finding a symbol and declaring it takes as long as a small kernel
def function(name: str, *arguments: type) -> Any:
    """A C function of the library that returns 0, or the number of what is wrong."""
    library = load()
    if library is None:
        raise KernelError(f"the native kernel {name} is not here: {'; '.join(FALLBACKS)}")
    found = getattr(library, name)
    found.argtypes = arguments
    found.restype = ctypes.c_int
    return found


def code(x: Tensor) -> int:
    """The format of a tensor as C++ names it."""
    if x.dtype not in FORMATS:
        names = ", ".join(str(dtype) for dtype in FORMATS)
        raise KernelError(f"native kernels take {names}, not {x.dtype}")
    return FORMATS[x.dtype]


def pointer(x: Tensor | None) -> int | None:
    """The address of a tensor's first element on the CPU; None for none."""
    if x is None:
        return None
    if x.device.type != "cpu":
        raise KernelError(f"native kernels take tensors on the CPU, not on {x.device}")
    return x.data_ptr()
