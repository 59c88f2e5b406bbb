"""Ridge regression in closed form: the penalty chosen by leave-one-out errors, what it is worth by cross-validation.

Predictors are centred and brought to one scale, several responses share their penalty. Leave-one-out residuals come
from one decomposition: eᵢ / (1 − hᵢ) with h the diagonal of the hat matrix, the intercept's 1/n included (Golub, Heath
& Wahba 1979). Shapes: n rows, K predictors, J responses. All float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PENALTIES = np.logspace(-6, 3, 28)
"""Tried, as multiples of n: the standardised predictors have squared norm n."""


@dataclass(frozen=True)
class Ridge:
    """A fit: `predict` gives responses of new rows.

    Attributes:
        weight_KJ, mean_K, scale_K, intercept_J: of standardised predictors.
        penalty: the one chosen.
        left_out_nJ: each row's prediction by the fit without it, at that penalty.
    """

    weight_KJ: np.ndarray
    mean_K: np.ndarray
    scale_K: np.ndarray
    intercept_J: np.ndarray
    penalty: float
    left_out_nJ: np.ndarray

    def predict(self, given_nK: np.ndarray) -> np.ndarray:
        """Return response_nJ."""
        return (given_nK - self.mean_K) / self.scale_K @ self.weight_KJ + self.intercept_J


def fit(given_nK: np.ndarray, response_nJ: np.ndarray) -> Ridge:
    """Fit with the penalty of the least mean squared leave-one-out error, each response in units of its spread.

    At least three rows; a predictor that is constant takes no part.
    """
    count = len(given_nK)
    mean_K, scale_K = given_nK.mean(axis=0), given_nK.std(axis=0)
    scale_K = np.where(scale_K > 0, scale_K, 1.0)
    intercept_J = response_nJ.mean(axis=0)
    centred_nJ = response_nJ - intercept_J
    spread_J = centred_nJ.std(axis=0)
    spread_J = np.where(spread_J > 0, spread_J, 1.0)
    left, singular, right = np.linalg.svd((given_nK - mean_K) / scale_K, full_matrices=False)
    turned = left.T @ centred_nJ
    best: tuple[float, float, np.ndarray] | None = None
    for penalty in PENALTIES * count:
        shrink = singular**2 / (singular**2 + penalty)
        residual_nJ = centred_nJ - left @ (shrink[:, None] * turned)
        leverage_n = (left**2) @ shrink + 1.0 / count
        out_nJ = residual_nJ / np.maximum(1.0 - leverage_n, 1e-9)[:, None]
        error = float(np.mean((out_nJ / spread_J) ** 2))
        if best is None or error < best[0]:
            best = error, float(penalty), out_nJ
    assert best is not None
    _, penalty, out_nJ = best
    weight_KJ = right.T @ ((singular / (singular**2 + penalty))[:, None] * turned)
    return Ridge(weight_KJ, mean_K, scale_K, intercept_J, penalty, response_nJ - out_nJ)


def cross_validated(given_nK: np.ndarray, response_nJ: np.ndarray, folds: int, rng: np.random.Generator) -> np.ndarray:
    """Return each row's prediction by the fit on the other folds, penalty chosen there; rows are dealt at random."""
    count = len(given_nK)
    fold_n = rng.permutation(count) % min(folds, count)
    found_nJ = np.empty(response_nJ.shape)
    for fold in np.unique(fold_n):
        out = fold_n == fold
        found_nJ[out] = fit(given_nK[~out], response_nJ[~out]).predict(given_nK[out])
    return found_nJ
