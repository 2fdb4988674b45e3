"""Curves out of step records: what is drawn when there are more steps than pixels.

A curve is an array [N, 2] of (step, value), both finite, in order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]

BUCKETS = 280
SMOOTHING_SHARE = 40  # the mean is taken over about one 40th of the run
SMALLEST_WINDOW = 5  # steps; a mean of fewer only doubles the curve


def curve(rows: Iterable[dict[str, Any]], key: str) -> Curve:
    """(step, value) of the rows where `key` is a finite number."""
    # type(), not isinstance: true is no number, and there may be 100,000 rows.
    pairs = [(row["step"], row[key]) for row in rows if type(row.get(key)) in (int, float)]
    points = np.array(pairs, np.float64).reshape(-1, 2)
    return points[np.isfinite(points).all(axis=1)]


def downsample(points: Curve, buckets: int = BUCKETS) -> Curve:
    """At most four points a bucket of steps: first, lowest, highest, last (M4, Jugel et al. 2014).

    Drawn as a line it covers the same pixels as all points would: no spike is lost.
    """
    if len(points) <= 4 * buckets:
        return points
    steps, values = points[:, 0], points[:, 1]
    scaled = (steps - steps[0]) * (buckets / (steps[-1] - steps[0]))
    bucket = np.minimum(scaled.astype(np.int64), buckets - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1)).tolist()
    kept: set[int] = set()
    for begin, end in zip(starts, [*starts[1:], len(points)], strict=True):
        inside = values[begin:end]
        kept |= {begin, begin + int(inside.argmin()), begin + int(inside.argmax()), end - 1}
    return points[sorted(kept)]


def smoothing_window(count: int) -> int:
    """How many steps a mean is taken over, an odd number; 1 where there are too few for one."""
    window = count // SMOOTHING_SHARE // 2 * 2 + 1
    return window if window >= SMALLEST_WINDOW else 1


def smooth(points: Curve, window: int) -> Curve:
    """Centred mean over `window` (odd) points: it does not lag behind, as a running mean would.

    Towards both ends the window shrinks evenly, so that the curve is not bent; where it would be
    less than a quarter, the curve ends.
    """
    half = window // 2
    index = np.arange(len(points))
    reach = np.minimum(half, np.minimum(index, index[::-1]))
    enough = reach >= half // 4
    index, reach = index[enough], reach[enough]
    sums = np.concatenate([[0.0], np.cumsum(points[:, 1])])
    means = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
    return np.column_stack([points[index, 0], means])
