"""The median of all pairwise slopes, with its rank interval: a slope that a few wild points do not move.

The interval is that of Kendall's statistic in its normal approximation: it needs no law of the noise.
Source: Sen 1968, "Estimates of the regression coefficient based on Kendall's tau", JASA 63.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri


def theil_sen(x: Sequence[float], y: Sequence[float], confidence: float) -> tuple[float, float, float] | None:
    """Return (slope, low, high), each bound one-sided at `confidence`; None for fewer than two distinct x.

    Args:
        x: finite, no two alike (a pair of equal x says nothing and is left out).
        y: finite, as many.
        confidence: of each bound, 0.5 to 1. A bound that so few points cannot give is infinite.
    """
    x_N, y_N = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    first, second = np.triu_indices(len(x_N), 1)
    apart = x_N[first] != x_N[second]
    slopes = np.sort((y_N[second] - y_N[first])[apart] / (x_N[second] - x_N[first])[apart])
    count, points = len(slopes), len(x_N)
    if not count:
        return None
    reach = float(ndtri(confidence)) * math.sqrt(points * (points - 1) * (2 * points + 5) / 18)
    upper = round((count + reach) / 2)
    low, high = count - upper - 1, upper
    return (
        float(np.median(slopes)),
        float(slopes[low]) if low >= 0 else -math.inf,
        float(slopes[high]) if high < count else math.inf,
    )
