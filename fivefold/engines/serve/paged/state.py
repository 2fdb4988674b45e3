"""Counts of what an engine is busy with, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine is busy with: counts of sequences, blocks and tokens."""

    running: int
    waiting: int
    blocks: int
    blocks_owned: int
    blocks_cached: int
    tokens_asked: int
    """Prompt tokens looked for in the prefix cache so far, and those of them found there."""
    tokens_hit: int
    preemptions: int
    steps: int
