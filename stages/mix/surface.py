"""The loss over mixtures, fitted and minimised: y(x) = exp(c) + exp(⟨t, x⟩), x a point of the simplex.

Fitted by L-BFGS from a grid of starts with Huber's loss, chosen by its least penalised mean; float64, no torch. Source:
the mixing law of Ye et al. 2024 (arXiv 2403.16952) as OP-Mix uses it (arXiv 2605.15220): Huber's δ 0.02, ten starts of
c times thirty of t, a penalty of 0.05 KL(x ‖ prior). Shapes: X points, P parts, J losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

HUBER = 0.02


@dataclass(frozen=True)
class Surface:
    """Fitted losses: c_J and t_JP."""

    c_J: np.ndarray
    t_JP: np.ndarray

    def __call__(self, x_XP: np.ndarray) -> np.ndarray:
        """Return y_XJ, nats."""
        return np.asarray(np.exp(self.c_J) + np.exp(x_XP @ self.t_JP.T))


def fit(x_XP: np.ndarray, y_XJ: np.ndarray, rng: np.random.Generator, *, starts: int = 30) -> Surface:
    """Return the surface with the least Huber loss over all starts.

    Args:
        x_XP: points; y_XJ: losses there, nats.
        rng: of the starts' slopes.
        starts: random slopes for each of ten starts of c.
    """
    parts = x_XP.shape[1]
    found = []
    for y_X in y_XJ.T:
        low = np.log(max(float(y_X.min()), 1e-6))
        best, least = np.zeros(parts + 1), np.inf
        for c in np.linspace(-2.0, 1.5, 10):
            for _ in range(starts):
                slopes = rng.uniform(-1.0, 0.1, parts)
                start = np.concatenate([[c], slopes + max(0.0, low - 0.5)])
                result = minimize(_huber, start, args=(x_XP, y_X), jac=True, method="L-BFGS-B")
                if result.fun < least:
                    best, least = result.x, float(result.fun)
        found.append(best)
    matrix = np.array(found)
    return Surface(matrix[:, 0], matrix[:, 1:])


def _huber(values: np.ndarray, x_XP: np.ndarray, y_X: np.ndarray) -> tuple[float, np.ndarray]:
    """Return (sum of Huber's loss, its gradient) at (c, t)."""
    floor = np.exp(np.minimum(values[0], 30.0))
    slope_X = np.exp(np.minimum(x_XP @ values[1:], 30.0))
    error_X = floor + slope_X - y_X
    small_X = np.abs(error_X) <= HUBER
    loss_X = np.where(small_X, 0.5 * error_X**2, HUBER * (np.abs(error_X) - 0.5 * HUBER))
    pull_X = np.where(small_X, error_X, HUBER * np.sign(error_X))
    gradient = np.concatenate([[floor * pull_X.sum()], (pull_X * slope_X) @ x_XP])
    return float(loss_X.sum()), gradient


def choose(surface: Surface, prior_P: np.ndarray, penalty: float) -> np.ndarray:
    """Return x_P = argmin mean_j exp(⟨t_j, x⟩) + penalty · KL(x ‖ prior) on the simplex.

    The problem is convex and its minimum lies inside where `penalty` is above 0, so one descent over x = softmax(z)
    finds it. A part without a prior gets nothing.
    """
    open_P = prior_P > 0
    prior, slopes_JP = prior_P[open_P] / prior_P[open_P].sum(), surface.t_JP[:, open_P]

    def objective(z: np.ndarray) -> tuple[float, np.ndarray]:
        x = np.exp(z - z.max())
        x /= x.sum()
        losses_J = np.exp(slopes_JP @ x)
        logs = np.log(np.maximum(x, 1e-300) / prior)
        slope = losses_J @ slopes_JP / len(losses_J) + penalty * (logs + 1)
        return float(losses_J.mean() + penalty * x @ logs), x * (slope - x @ slope)

    result = minimize(objective, np.log(prior), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10})
    x_P = np.zeros(len(prior_P))
    x_P[open_P] = np.exp(result.x - result.x.max())
    return np.asarray(x_P / x_P.sum())
