"""Medoids (CoLM): rows that stand for their source, as many as its share, weighted by the rows they stand for.

Small sources are taken whole. A row's weight is the number of rows of its source that are nearest to it, scaled to a
mean of 1. Source: Nguyen et al. 2025 (CoLM), for the rows of a large batch, as `train.batch_selector: {method: colm}`
has it; here of the whole pool, on the features that scoring left (`stages.coreset.medoids`).
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.coreset.medoids import mean_one, medoids
from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice
from stages.select.sources import coded


class Medoids(FeatureSelector):
    """Weighted medoids of every source, small sources whole."""

    small: float = Field(0.0, ge=0, lt=1, description="Share of the rows up to which a source is taken whole.")
    dimensions: int = Field(2560, ge=1, description="Numbers of a gradient that count in its source.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return small sources whole, then the others in turns by their share, each row with its weight.

        Raises `BudgetError` for a source too large to compare all pairs.
        """
        rows = self.rows(pool)
        source_B, names = coded(pool.sources, rows)
        size_G = np.bincount(source_B, minlength=len(names))
        self.require_dense(int(size_G.max()))
        whole_G = size_G <= self.small * len(rows)
        found = medoids(self.matrix(pool, rows), source_B, whole_G, self.dimensions, wanted(quota, pool, rows))
        chosen = quota.fill(rows[found.ranked], pool.lengths_N)
        stands_S = found.stood_for(len(chosen))
        kept = stands_S > 0  # an equal row before it stands for all that it would
        return Choice(
            chosen[kept],
            weights=mean_one(stands_S[kept]),
            reason="stands for rows of {group}",
            group=source_B[found.ranked[: len(chosen)][kept]],
            groups=names,
            short="" if kept.all() else "the others repeat a gradient that was chosen",
        )
