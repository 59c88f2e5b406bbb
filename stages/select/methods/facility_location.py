"""Facility location: rows such that every row of the pool has a similar one among them.

Σᵢ max_{j∈S} max(0, cos(xᵢ, xⱼ)), maximised greedily, exactly by lazy evaluation: within 1 − 1/e of the best. All pairs
are compared up to some 11,000 rows; above that each row knows its nearest neighbours alone, and what is farther counts
as unlike. With `epsilon` each step looks at a random sample (Mirzasoleiman et al. 2015): 1 − 1/e − ε in expectation,
and gains that may rise. Source: Wei, Iyer & Bilmes 2015; with `best` below 1 after a quality score, as in
Superfiltering (Li et al. 2024).
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


class FacilityLocation(FeatureSelector):
    """The rows that stand for all others, most representative first."""

    supported = True

    neighbours: int = Field(64, ge=1, le=4096, description="Nearest rows that a row is compared with in a large pool.")
    epsilon: float = Field(
        0.0, ge=0, lt=1, description="ε of stochastic greedy: each step looks at (N/k) ln(1/ε) rows; 0 is exact greedy."
    )

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows in the order taken; `gain` is how much nearer the pool came to the set with each."""
        rows = self.rows(pool)
        most = wanted(quota, pool, rows)
        order, gain = self.covering(pool, rows, most, self.neighbours, epsilon=self.epsilon, rng=rng)
        chosen = quota.fill(rows[order], pool.lengths_N)
        return Choice(chosen, gain=gain[: len(chosen)], reason="brings the pool nearer to the selection by {gain}")
