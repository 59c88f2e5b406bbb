"""SemDeDup: the best rows by score, leaving out what means nearly the same as a row already kept.

Rows come by falling score; one whose features are within `epsilon` of a kept row's (cosine above 1 − epsilon) is left
out. Neighbours are exact. What is left out is put behind what is kept: it is chosen only where the quota asks for more.
Source: Abbas et al. 2023, without its clusters, which only save comparisons.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.coreset.similarity import nearest_cosine, unit_rows
from stages.select.coreset import FeatureSelector
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


class Semdedup(FeatureSelector):
    """Top by score among rows that do not repeat each other."""

    reads = frozenset({"features", "scores"})

    epsilon: float = Field(0.1, gt=0, lt=1, description="Largest 1 − cosine at which two rows say the same.")
    neighbours: int = Field(32, ge=1, le=4096, description="Nearest rows that are looked at for repetitions.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return kept rows by falling score, then repetitions by falling score; `gain` is the score."""
        assert pool.score_N is not None
        rows = self.rows(pool)
        rows = rows[np.argsort(-pool.score_N[rows], kind="stable")]
        near = nearest_cosine(unit_rows(self.matrix(pool, rows)), self.neighbours + 1)
        near.data[near.data <= 1 - self.epsilon] = 0
        near.eliminate_zeros()
        kept_B = np.zeros(len(rows), dtype=bool)
        for at in range(len(rows)):
            kept_B[at] = not kept_B[near.indices[near.indptr[at] : near.indptr[at + 1]]].any()
        order = np.concatenate([rows[kept_B], rows[~kept_B]])
        chosen = quota.fill(order, pool.lengths_N)
        return Choice(chosen, gain=pool.score_N[chosen], reason="score {score}, the best of what says the same")
