"""Shuffles that are pure functions of their key: the same on every machine and release."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permutation(count: int, *key: int | str) -> NDArray[np.int64]:
    """The numbers below `count` in an order that only `key` decides.

    Sorted by random 64-bit numbers of SplitMix64 (Steele et al. 2014). Not NumPy's own shuffle,
    whose stream may change between releases, and with it what a resumed run reads.
    """
    return np.argsort(_random(count, *key), kind="stable").astype(np.int64)


def _random(count: int, *key: int | str) -> NDArray[np.uint64]:
    seed = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    with np.errstate(over="ignore"):
        state = np.frombuffer(seed, "<u8")[0] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        return state ^ (state >> np.uint64(31))
