"""Groups of like things by their affinities: spectral clustering, the number of groups from the largest eigengap.

Eigenvectors of the normalised Laplacian, rows at length one, then k-means from the points farthest from each other, so
that nothing is by chance. For some tens of things; one that is like no other may be put with some. Source: Ng, Jordan &
Weiss 2001; von Luxburg 2007, sections 5 and 8.
"""

from __future__ import annotations

import numpy as np


def spectral_groups(affinity_PP: np.ndarray, *, groups: int | None = None, most: int = 8) -> np.ndarray:
    """Return label_P int64, numbered by first appearance.

    Args:
        affinity_PP: symmetric, at least 0, above 0 on its diagonal.
        groups: how many; None takes the number k from 2 to `most` (and below P) with the largest gap between the k-th
            and the next eigenvalue. Fewer than three things are a group each.
    """
    count = len(affinity_PP)
    if count < 3 and groups is None:
        return np.arange(count)
    root_P = 1 / np.sqrt(affinity_PP.sum(axis=1))
    value, vector_PP = np.linalg.eigh(np.eye(count) - root_P[:, None] * affinity_PP * root_P)
    if groups is None:
        gaps = np.diff(value)[1 : min(most, count - 1)]  # of k = 2, 3, …
        groups = 2 + int(np.argmax(gaps))
    groups = min(groups, count)
    row_PK = vector_PP[:, :groups]
    row_PK = row_PK / np.maximum(np.linalg.norm(row_PK, axis=1, keepdims=True), 1e-12)
    label_P = _k_means(row_PK, groups)
    _, first, label_P = np.unique(label_P, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[label_P], dtype=np.int64)


def _k_means(row_PK: np.ndarray, groups: int) -> np.ndarray:
    centres = [0]
    while len(centres) < groups:
        near = ((row_PK[:, None] - row_PK[centres]) ** 2).sum(axis=2).min(axis=1)
        centres.append(int(near.argmax()))
    centre_GK, label_P = row_PK[centres].copy(), np.full(len(row_PK), -1)
    while True:
        found_P = ((row_PK[:, None] - centre_GK) ** 2).sum(axis=2).argmin(axis=1)
        if np.array_equal(found_P, label_P):
            return found_P
        label_P = found_P
        for group in np.unique(label_P):
            centre_GK[group] = row_PK[label_P == group].mean(axis=0)
