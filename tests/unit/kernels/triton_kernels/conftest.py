"""The interpreter that every test of a Triton kernel calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreted import Interpreter

from fivefold.kernels.triton import is_available

sys.path.append(str(Path(__file__).parents[1]))  # kernel_cases, also when this folder runs alone


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """`interpreter(module, function, *args)`, in one process for the session."""
    if not is_available():
        pytest.skip("triton is not installed")
    running = Interpreter()
    yield running.call
    running.stop()
