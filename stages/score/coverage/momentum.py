"""Momentum: every row is computed, and its score averaged with those of earlier rounds.

After training on the best rows fresh scores can be nearly uncorrelated with the old ones and come back later: a
selection that follows them swings to and fro. The average is Σ_k decayᵏ s_{t−k} / Σ_k decayᵏ over the rounds that
have the row, k = 0 now, each round's scores brought to one scale first. It is taken from each round's own columns, not
from what earlier rounds made of them, so it does not depend on how those were averaged.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from stages.score.cover import Coverage, Covered, Pool


class Momentum(Coverage):
    """A falling-weight mean of normalised scores over rounds; in the first round the normalised scores themselves."""

    whole = True

    decay: float = Field(0.5, ge=0, lt=1, description="Weight of a round relative to the one after it.")
    normalise: Literal["rank", "scale"] = Field(
        "rank", description="Ranks in (0, 1), or scores less their mean over their standard deviation."
    )

    def cover(self, pool: Pool) -> Covered:
        """Score all rows and average."""
        now_N = self._normal(pool.method.finish(pool.score("full").score()))
        total_N, weight_N = now_N.copy(), np.ones(len(now_N))
        rounds = 0
        for rounds, scoring in enumerate(pool.previous(), start=1):
            before_N = self._normal(pool.method.finish(pool.combined(scoring.group_NJ)))
            there, weight = np.isfinite(before_N), self.decay**rounds
            total_N[there] += weight * before_N[there]
            weight_N[there] += weight
        return Covered(
            (total_N / weight_N).astype(np.float32), finished=True, facts={"earlier_rounds_averaged": rounds}
        )

    def _normal(self, score_N: np.ndarray) -> np.ndarray:
        """Return normalised scores, float64, NaN kept."""
        found, here = np.full(len(score_N), np.nan), np.flatnonzero(np.isfinite(score_N))
        values = score_N[here].astype(np.float64)
        if self.normalise == "rank":
            _, code, counts = np.unique(values, return_inverse=True, return_counts=True)
            found[here] = ((np.cumsum(counts) - counts / 2) / max(1, len(values)))[code]  # ties at their mean rank
        elif len(values):
            found[here] = (values - values.mean()) / (values.std() or 1.0)
        return found
