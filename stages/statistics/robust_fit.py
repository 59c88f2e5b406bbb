"""A straight line through a few noisy points, with the uncertainty of its slope.

Weighted least squares with weights 1/se²; the scale of the noise is taken from the residuals, because evaluations on
the same items share most of their error and the reported standard errors only say which point is noisier.
Source: Draper & Smith, Applied Regression Analysis (1998), sections 1.4 and 9.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit


@dataclass(frozen=True)
class Line:
    """A fitted slope.

    Args:
        slope: in units of y per unit of x.
        slope_se: its standard error; infinite where two points without known errors leave it unknown.
        freedom: degrees of freedom behind the standard error; 0 where it comes from the points' own errors.
        points: how many were fitted.
    """

    slope: float
    slope_se: float
    freedom: int
    points: int

    def bound(self, confidence: float) -> float:
        """Return the one-sided upper confidence bound of the slope (lower for `confidence` below 0.5).

        Student's t with `freedom` degrees; the normal distribution where the points' own errors were used.
        """
        if self.slope_se == 0:
            return self.slope
        quantile = stdtrit(self.freedom, confidence) if self.freedom else ndtri(confidence)
        return self.slope + float(quantile) * self.slope_se


def fit_line(x: Sequence[float], y: Sequence[float], se: Sequence[float | None] | None = None) -> Line | None:
    """Fit y = a + slope · x and return the slope; None for fewer than two distinct x.

    Args:
        x, y: finite numbers, equally many.
        se: standard error of each y; where one is missing or zero all points weigh the same.

    slope = Σ w (x−x̄)(y−ȳ) / S, S = Σ w (x−x̄)², x̄ and ȳ weighted means. With three points or more
    Var(slope) = (Σ w r² / (n−2)) / S; with two, 1/S with the given errors.
    """
    x_N, y_N = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = se is not None and all(value is not None and value > 0 and math.isfinite(value) for value in se)
    weight_N = 1.0 / np.square(np.asarray(se, dtype=np.float64)) if known else np.ones_like(x_N)
    span = float(np.ptp(x_N)) if len(x_N) else 0.0
    if span == 0.0:
        return None
    scaled_N = (x_N - x_N[0]) / span  # FLOPs reach 1e18: keep the sums well conditioned
    dx_N = scaled_N - np.average(scaled_N, weights=weight_N)
    dy_N = y_N - np.average(y_N, weights=weight_N)
    spread = float(np.sum(weight_N * dx_N**2))
    slope = float(np.sum(weight_N * dx_N * dy_N)) / spread
    freedom = len(x_N) - 2
    if freedom > 0:
        residual_N = dy_N - slope * dx_N
        error = math.sqrt(float(np.sum(weight_N * residual_N**2)) / freedom / spread)
    else:
        error = math.sqrt(1.0 / spread) if known else math.inf
    return Line(slope / span, error / span, freedom, len(x_N))
