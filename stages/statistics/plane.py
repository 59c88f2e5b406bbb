"""A plane through many points: their two principal components, so that they can be looked at.

For dense rows and sparse ones alike, by Lanczos iterations on the centred rows, which are never made dense. The same
input gives the same plane: the start is fixed, and each axis points to where its largest loading is positive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator, svds


def principal_plane(row_NK: Any) -> tuple[np.ndarray, float]:
    """Return (coordinates_N2, the share of the variance that they hold) of dense or sparse rows.

    Axes without variance are 0, and the share of rows that are all alike is 1.
    """
    count, width = row_NK.shape
    mean_K = np.asarray(row_NK.mean(axis=0), dtype=np.float64).ravel()
    squares = (row_NK.multiply(row_NK) if hasattr(row_NK, "multiply") else np.square(row_NK, dtype=np.float64)).sum()
    total = float(squares) - count * float(mean_K @ mean_K)
    coordinates_N2 = np.zeros((count, 2))
    if total <= 1e-9 * max(float(squares), 1e-300):
        return coordinates_N2, 1.0
    if min(count, width) < 4:  # too small for Lanczos
        dense_NK = np.asarray(row_NK.todense() if hasattr(row_NK, "todense") else row_NK, dtype=np.float64) - mean_K
        left_NC, value_C, right_CK = np.linalg.svd(dense_NK, full_matrices=False)
    else:
        centred = LinearOperator(
            (count, width),
            matvec=lambda v_K: row_NK @ v_K.ravel() - mean_K @ v_K.ravel(),
            rmatvec=lambda v_N: row_NK.T @ v_N.ravel() - mean_K * v_N.sum(),
            dtype=np.float64,
        )
        start = np.random.default_rng(0).normal(size=min(count, width))
        left_NC, value_C, right_CK = svds(centred, k=2, v0=start)
    order = np.argsort(-value_C)[:2]
    for axis, component in enumerate(order.tolist()):
        towards = np.sign(right_CK[component][np.abs(right_CK[component]).argmax()])
        coordinates_N2[:, axis] = towards * left_NC[:, component] * value_C[component]
    return coordinates_N2, float((value_C[order] ** 2).sum() / total)
