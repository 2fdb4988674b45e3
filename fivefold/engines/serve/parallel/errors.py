"""How an engine of several ranks ends."""

from __future__ import annotations

from fivefold.engines.serve.paged.errors import EngineError


class RankError(EngineError):
    """A rank died or failed, and with it the engine."""
