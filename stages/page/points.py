"""Which of many rows a picture draws: a bounded number, so that a page stays small whatever the pool."""

from __future__ import annotations

import numpy as np

MOST_POINTS = 3000
BLUE, ORANGE, GREEN, GREY = "#3b6ea5", "#d9822b", "#3a8f5c", "#b8bcc2"


def spread(rows: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` of the row numbers, at equal steps; ids are hashes, so these are a random sample that stays
    the same."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def drawn(left_N: np.ndarray, right_N: np.ndarray) -> np.ndarray:
    """Return the row numbers to draw, of those with both numbers."""
    return spread(np.flatnonzero(np.isfinite(left_N) & np.isfinite(right_N)), MOST_POINTS)
