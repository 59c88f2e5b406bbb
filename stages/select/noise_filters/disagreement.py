"""Disagreement: rows that this scoring likes and another does not.

Each scoring's rows are ranked; the suspicion is the row's rank (0 worst, 1 best) by the scores that are chosen by,
minus its lowest rank in the others: by other methods, or by the same one at earlier checkpoints, which the pipeline
gives. What only one scoring finds good is chased rather than good. A row that no other scoring knows is kept.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from stages.select.noise import Evidence, NoiseFilter


class Disagreement(NoiseFilter):
    """Rank by the scores minus the lowest rank by the other scorings, from −1 to 1."""

    needs_scores = True

    def suspicion(self, evidence: Evidence) -> np.ndarray:
        """Return suspicion_N. Raises `ConfigError` where there are no scores; all NaN where there are no others."""
        if evidence.score_N is None:
            raise self.lacking("scores", "score the pool first, or use `answer_fit`")
        lowest_N = np.full(len(evidence.score_N), np.nan)
        for other_N in evidence.others:
            lowest_N = np.fmin(lowest_N, _ranks(other_N))
        return _ranks(evidence.score_N) - lowest_N


def _ranks(value_N: np.ndarray) -> np.ndarray:
    """Return the share of known values below each, ties at their middle; NaN where it is not known."""
    known = np.flatnonzero(np.isfinite(value_N))
    found_N = np.full(len(value_N), np.nan)
    found_N[known] = (rankdata(value_N[known]) - 0.5) / max(len(known), 1)
    return found_N
