"""Sets that spread out: k-center by farthest point first, and the likeliest set of a determinantal point process.

Imports no torch. Shapes: n rows, K numbers a row, k rows chosen.
"""

from __future__ import annotations

import numpy as np

from stages.meter.products import product

TINY = 1e-10
"""The share of a row's squared length outside the span of what was taken that counts as none."""


def k_center(feature_nK: np.ndarray, count: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, distance of each to those before it): every row ends within twice the best possible radius.

    Farthest point first from row `first` (Gonzalez 1985), O(n·K·count); ties go to the smaller row. The first distance
    is infinite; distances never rise.
    """
    count = min(count, len(feature_nK))
    rows, far = np.empty(count, dtype=np.int64), np.empty(count)
    square_n = np.einsum("nk,nk->n", feature_nK, feature_nK, dtype=np.float64)
    nearest_n = np.full(len(feature_nK), np.inf)
    for step in range(count):
        row = first if step == 0 else int(nearest_n.argmax())
        rows[step], far[step] = row, np.sqrt(max(nearest_n[row], 0.0))
        product_n = product(feature_nK, feature_nK[row]).astype(np.float64)
        np.minimum(nearest_n, np.maximum(square_n + square_n[row] - 2 * product_n, 0.0), out=nearest_n)
        nearest_n[row] = -1.0  # taken
    return rows, far


def dpp_map(feature_nK: np.ndarray, quality_n: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, gain in log-determinant of each) of greedy on log det of L = diag(q) X Xᵀ diag(q).

    The greedy Cholesky of Chen, Zhang & Zhou 2018: O(n·count²), memory n·min(count, K). It ends early, with fewer rows,
    where what is left lies in the span of what was taken: a larger set has probability zero. `quality_n` is at least 0.
    """
    scaled_nK = np.asarray(feature_nK, dtype=np.float64) * quality_n[:, None]
    left_n = np.einsum("nk,nk->n", scaled_nK, scaled_nK)
    enough_n = TINY * left_n
    factor_nk = np.zeros((len(scaled_nK), min(count, *scaled_nK.shape)))
    rows: list[int] = []
    gains: list[float] = []
    for step in range(factor_nk.shape[1]):
        left_n[left_n <= enough_n] = -np.inf
        row = int(left_n.argmax())
        if left_n[row] == -np.inf:
            break
        rows.append(row)
        gains.append(float(np.log(left_n[row])))
        column_n = product(scaled_nK, scaled_nK[row]) - product(factor_nk[:, :step], factor_nk[row, :step])
        factor_nk[:, step] = column_n / np.sqrt(left_n[row])
        left_n -= factor_nk[:, step] ** 2
        left_n[row] = -np.inf
    return np.array(rows, dtype=np.int64), np.array(gains)
