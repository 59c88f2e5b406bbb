"""Rank correlation."""

from __future__ import annotations

import numpy as np


def spearman(left: np.ndarray, right: np.ndarray) -> float | None:
    """Return Spearman's rank correlation (ties at their mean rank); None where either side is constant."""
    if len(left) < 2:
        return None
    ranks = [_ranks(np.asarray(side, dtype=np.float64)) for side in (left, right)]
    centred = [rank - rank.mean() for rank in ranks]
    norm = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum() / norm) if norm > 0 else None


def _ranks(values: np.ndarray) -> np.ndarray:
    _, code, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[code]
