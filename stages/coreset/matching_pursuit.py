"""Weighted rows whose sum comes near to a given vector: orthogonal matching pursuit with weights of at least 0.

min_w ‖Aᵀw − b‖² + λ‖w‖², w ≥ 0, at most k of them not 0 (GradMatch, Killamsetty et al. 2021, algorithm 2): the row
that the residual points at most is taken, and all weights are solved for again. Imports no torch. Shapes: n rows, K
numbers a row, S rows taken.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls


def matching_pursuit(
    feature_nK: np.ndarray, wanted_K: np.ndarray, count: int, *, ridge: float = 0.0, tolerance: float = 1e-4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows, weights, errors): rows in the order taken, their final weights, ‖Aᵀw − b‖ / ‖b‖ after each.

    It ends early where the error is at most `tolerance` or no row points along the residual. A weight may end at 0: its
    row stopped being needed. Raises `ValueError` where `wanted_K` is zero or not finite.
    """
    feature_nK = np.asarray(feature_nK, dtype=np.float64)
    wanted_K = np.asarray(wanted_K, dtype=np.float64)
    size = float(np.linalg.norm(wanted_K))
    if not np.isfinite(size) or size == 0:
        raise ValueError(f"the vector to match has norm {size}")
    rows: list[int] = []
    weight_S, errors = np.zeros(0), []
    residual_K = wanted_K.copy()
    for _ in range(min(count, len(feature_nK))):
        along_n = feature_nK @ residual_K
        along_n[rows] = -np.inf
        row = int(along_n.argmax())
        if along_n[row] <= 1e-12 * size**2:
            break
        rows.append(row)
        taken_SK = feature_nK[rows]
        damped = np.concatenate([taken_SK.T, np.sqrt(ridge) * np.eye(len(rows))]) if ridge else taken_SK.T
        weight_S = nnls(damped, np.concatenate([wanted_K, np.zeros(len(damped) - len(wanted_K))]))[0]
        residual_K = wanted_K - weight_S @ taken_SK
        errors.append(float(np.linalg.norm(residual_K)) / size)
        if errors[-1] <= tolerance:
            break
    return np.array(rows, dtype=np.int64), weight_S, np.array(errors)
