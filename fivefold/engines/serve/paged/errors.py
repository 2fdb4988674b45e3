"""What the paged engine refuses."""

from __future__ import annotations

from fivefold.core.errors import FivefoldError


class MemoryBudgetError(FivefoldError):
    """A model that does not fit into memory, or leaves no room for a cache."""


class EngineError(FivefoldError):
    """A setting that cannot work, or a call at the wrong time."""
