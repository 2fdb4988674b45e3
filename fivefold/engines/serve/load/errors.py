"""What is wrong with a load, before or while it runs."""

from __future__ import annotations

from fivefold.core.errors import FivefoldError


class LoadError(FivefoldError):
    """A server that cannot be reached or refuses, a trace that cannot be read, a wrong setting."""
