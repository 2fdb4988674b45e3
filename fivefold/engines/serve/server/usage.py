"""What answers of both generating endpoints have in common: names, times, counts of tokens."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fivefold import __version__
from fivefold.engines.serve.server.generation import Generation

FINGERPRINT = f"fivefold-{__version__}"


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that every object and chunk of an answer begins with."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def usage(generation: Generation, completion_tokens: int | None = None) -> dict[str, Any]:
    """Counts of tokens; `completion_tokens` where not all that were produced are given."""
    written = generation.completion_tokens if completion_tokens is None else completion_tokens
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": generation.prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }
