"""The median slope against scipy's, and its one promise: a few wild points do not move it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import theilslopes

from stages.statistics.theil_sen import theil_sen


@pytest.mark.parametrize("points", [5, 8, 20, 41])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_slope_and_interval_are_those_of_scipy(points, confidence):
    rng = np.random.default_rng(points)
    x, y = np.sort(rng.uniform(0, 1e15, points)), rng.normal(size=points)
    theirs = theilslopes(y, x, alpha=2 * confidence - 1)
    assert theil_sen(x, y, confidence) == pytest.approx((theirs[0], theirs[2], theirs[3]), rel=1e-12)


def test_a_quarter_of_wild_points_leaves_the_slope_in_place():
    x = np.arange(16.0)
    y = 3 - 0.1 * x
    y[[2, 7, 11, 14]] += [50, -30, 80, 1e6]
    assert theil_sen(x, y, 0.9)[0] == pytest.approx(-0.1, rel=1e-6)


def test_two_points_have_a_slope_without_bounds_and_one_has_none():
    slope, low, high = theil_sen([1, 3], [4, 2], 0.9)
    assert (slope, low, high) == (-1.0, -math.inf, math.inf)
    assert theil_sen([1], [4], 0.9) is None
    assert theil_sen([1, 1], [4, 5], 0.9) is None
