"""k-means: Lloyd's iterations from seeds that are drawn far apart.

Seeds by k-means++ (Arthur & Vassilvitskii 2007): each next one with probability proportional to its squared distance
from those before. A cluster that loses all its rows takes the row that is farthest from its centre. The same generator
gives the same clusters. Imports no torch. Held: the rows in float64 around their mean, and a block's distances.
Shapes: n rows, K numbers a row, C clusters.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from stages.meter.products import product

BLOCK_ROWS = 4096


def k_means(
    feature_nK: np.ndarray, clusters: int, rng: np.random.Generator, *, iterations: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Return (label_n, square_n): each row's cluster, and its squared distance from that cluster's centre.

    There are at most as many clusters as different rows, numbered from 0 without gaps. A centre is the mean of its rows
    at the end of the last iteration; it ends early where no row changes.
    """
    row_nK = np.asarray(feature_nK, dtype=np.float64)
    row_nK = row_nK - row_nK.mean(axis=0)  # far from the origin, distances would cancel
    centre_CK = _seeds(row_nK, clusters, rng)
    label_n, square_n = _nearest(row_nK, centre_CK)
    for _ in range(iterations):
        count_C = np.bincount(label_n, minlength=len(centre_CK))
        for empty in np.flatnonzero(count_C == 0).tolist():
            far = int(np.where(count_C[label_n] > 1, square_n, -1.0).argmax())
            count_C[label_n[far]] -= 1
            label_n[far], square_n[far], count_C[empty] = empty, 0.0, 1
        member_Cn = csr_matrix((np.ones(len(row_nK)), (label_n, np.arange(len(row_nK)))), (len(centre_CK), len(row_nK)))
        centre_CK = (member_Cn @ row_nK) / count_C[:, None]
        before_n = label_n
        label_n, square_n = _nearest(row_nK, centre_CK)
        if (label_n == before_n).all():
            break
    return np.unique(label_n, return_inverse=True)[1], square_n


def _seeds(row_nK: np.ndarray, clusters: int, rng: np.random.Generator) -> np.ndarray:
    chosen = [int(rng.integers(len(row_nK)))]
    square_n = np.square(row_nK - row_nK[chosen[0]]).sum(axis=1)
    while len(chosen) < min(clusters, len(row_nK)) and square_n.any():
        passed = square_n.cumsum()
        row = int(np.searchsorted(passed, rng.random() * passed[-1], side="right"))
        chosen.append(min(row, len(row_nK) - 1))
        np.minimum(square_n, np.square(row_nK - row_nK[chosen[-1]]).sum(axis=1), out=square_n)
    return row_nK[chosen]


def _nearest(row_nK: np.ndarray, centre_CK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's nearest centre (ties to the first) and its squared distance, which does not cancel."""
    label_n = np.empty(len(row_nK), dtype=np.int64)
    square_n = np.empty(len(row_nK))
    half_C = np.square(centre_CK).sum(axis=1) / 2
    for start in range(0, len(row_nK), BLOCK_ROWS):
        here = slice(start, start + BLOCK_ROWS)
        label_n[here] = (half_C - product(row_nK[here], centre_CK.T)).argmin(axis=1)
        square_n[here] = np.square(row_nK[here] - centre_CK[label_n[here]]).sum(axis=1)
    return label_n, square_n
