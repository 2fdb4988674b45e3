"""fivefold: one model definition, planned, trained, aligned, compressed and served on five axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.core.environment import bound_spinning

if TYPE_CHECKING:
    from fivefold.engines.serve.llm import LLM as LLM
    from fivefold.engines.serve.sampling_params import SamplingParams as SamplingParams
    from fivefold.engines.serve.structured.form import StructuredOutputs as StructuredOutputs

__version__ = "0.1.0"
_LAZY = {
    "LLM": "fivefold.engines.serve.llm",
    "SamplingParams": "fivefold.engines.serve.sampling_params",
    "StructuredOutputs": "fivefold.engines.serve.structured.form",
}
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


bound_spinning()  # before torch is loaded, which reads it then


def __getattr__(name: str) -> object:
    """Names that need torch are imported when they are asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
