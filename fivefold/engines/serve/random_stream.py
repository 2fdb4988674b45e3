"""Random numbers as a function of (seed, token index): no generator state to keep or lose.

A request that is preempted, moved to another batch or recomputed draws the same numbers, and
its neighbours never matter. The mix is SplitMix64 (Steele, Lea, Flood 2014), which passes
BigCrush; the seed is mixed first so that neighbouring seeds give unrelated streams.
"""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """The index-th number in [0, 1) of the stream `seed`, a multiple of 2**-53."""
    key = _mix((seed + _GAMMA) & _MASK)
    return (_mix((key + (index + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A seed that the operating system drew."""
    return secrets.randbits(64)
