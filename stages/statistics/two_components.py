"""Two groups in one row of numbers: a mixture of two normal densities, fitted by expectation maximisation.

Says where the upper group begins, and says so only where two groups explain the numbers better than one (Schwarz's
criterion). Deterministic: it starts from the two halves of the sorted numbers. A skewed single group looks like two:
what a split means is for the caller to know. Holds some 40 bytes a number.
"""

from __future__ import annotations

import numpy as np

STEPS, TOLERANCE = 500, 1e-10
NARROWEST = 1e-3
"""Least deviation of a component, in deviations of all numbers: a component may not shrink to one point."""


def upper_of_two(value_N: np.ndarray) -> np.ndarray | None:
    """Return whether each number more likely belongs to the group with the larger mean.

    None where one normal density explains the numbers as well (its Schwarz criterion is not higher), or they are fewer
    than four or all equal. Numbers below the lower mean belong to the lower group, however wide the upper one is.
    """
    value_N = np.asarray(value_N, dtype=np.float64)
    if len(value_N) < 4 or value_N.std() == 0:
        return None
    z_N = (value_N - value_N.mean()) / value_N.std()
    upper_N = np.zeros(len(z_N))
    upper_N[np.argsort(z_N, kind="stable")[len(z_N) // 2 :]] = 1.0
    before = -np.inf
    for _ in range(STEPS):
        share_2, mean_2, deviation_2 = _fitted(z_N, upper_N)
        log_2N = np.log(share_2)[:, None] + _log_density(z_N, mean_2, deviation_2)
        total_N = np.logaddexp(*log_2N)
        upper_N = np.exp(log_2N[1] - total_N)
        likelihood = float(total_N.sum())
        if likelihood - before <= TOLERANCE * len(z_N):
            break
        before = likelihood
    one = float(_log_density(z_N, np.zeros(1), np.ones(1)).sum())
    if 2 * (likelihood - one) <= 3 * np.log(len(z_N)):  # five numbers are fitted, not two
        return None
    low, high = int(np.argmin(mean_2)), int(np.argmax(mean_2))
    return np.asarray((log_2N[high] > log_2N[low]) & (z_N > mean_2[low]))


def _fitted(z_N: np.ndarray, upper_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return share, mean and deviation of the lower and the upper component under these memberships."""
    belongs_2N = np.stack([1 - upper_N, upper_N])
    count_2 = np.maximum(belongs_2N.sum(axis=1), 1e-12)
    mean_2 = belongs_2N @ z_N / count_2
    variance_2 = (belongs_2N * (z_N - mean_2[:, None]) ** 2).sum(axis=1) / count_2
    return count_2 / count_2.sum(), mean_2, np.maximum(np.sqrt(variance_2), NARROWEST)


def _log_density(z_N: np.ndarray, mean_C: np.ndarray, deviation_C: np.ndarray) -> np.ndarray:
    """Return the log of each component's normal density at each number, shape (components, numbers)."""
    off_CN = (z_N - mean_C[:, None]) / deviation_C[:, None]
    return np.asarray(-0.5 * off_CN**2 - np.log(deviation_C)[:, None] - 0.5 * np.log(2 * np.pi))
