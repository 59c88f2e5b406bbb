"""The straight-line fit against scipy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stages.statistics.robust_fit import fit_line

floats = st.floats(-100, 100, allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 10**6), floats), min_size=3, max_size=12, unique_by=lambda pair: pair[0]))
def test_equal_weights_give_the_slope_and_error_of_scipy(pairs):
    x, y = [p[0] for p in pairs], [p[1] for p in pairs]
    line = fit_line(x, y)
    expected = stats.linregress(x, y)
    scale = max(1.0, abs(expected.slope))
    assert line.slope == pytest.approx(expected.slope, abs=1e-7 * scale)
    assert line.slope_se == pytest.approx(expected.stderr, rel=1e-5, abs=1e-7 * scale)


def test_weighted_slope_solves_the_normal_equations():
    rng = np.random.default_rng(3)
    x, y, se = rng.random(7) * 1e15, rng.random(7), rng.random(7) + 0.1
    design = np.stack([np.ones(7), x / 1e15], axis=1)
    weight = np.diag(1 / se**2)
    covariance = np.linalg.inv(design.T @ weight @ design)
    beta = covariance @ design.T @ weight @ y
    residual = y - design @ beta
    scale = residual @ weight @ residual / 5
    line = fit_line(x, y, se)
    assert line.slope * 1e15 == pytest.approx(beta[1])
    assert line.slope_se * 1e15 == pytest.approx(math.sqrt(scale * covariance[1, 1]))


def test_two_points_use_their_own_errors():
    line = fit_line([0, 10], [3.0, 1.0], [0.3, 0.4])
    assert line.slope == pytest.approx(-0.2)
    assert line.slope_se == pytest.approx(0.05)  # hypot(0.3, 0.4) / 10
    assert line.bound(0.975) == pytest.approx(-0.2 + 1.959964 * 0.05)


def test_two_points_without_errors_leave_the_bound_infinite():
    assert fit_line([0, 1], [1.0, 0.0]).bound(0.9) == math.inf


def test_one_place_on_the_axis_gives_no_line():
    assert fit_line([5, 5], [1.0, 2.0]) is None
    assert fit_line([], []) is None


def test_the_bound_holds_at_its_confidence_on_noise():
    rng = np.random.default_rng(11)
    x = np.arange(5.0)
    covered = [fit_line(x, -0.3 * x + rng.normal(0, 1, 5)).bound(0.9) >= -0.3 for _ in range(3000)]
    assert np.mean(covered) == pytest.approx(0.9, abs=0.02)  # 3.6 standard errors of 3,000 draws
