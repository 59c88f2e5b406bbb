"""k-center: rows such that no row of the pool is far from all of them.

Farthest point first on features at length one: the largest distance left is within twice the best possible. Drawn to
outliers; a set for coverage, not for quality. Source: Gonzalez 1985; Sener & Savarese 2018 for training sets.
"""

from __future__ import annotations

import numpy as np

from stages.coreset.similarity import unit_rows
from stages.coreset.spread import k_center
from stages.meter.products import product
from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


class KCenter(FeatureSelector):
    """The row nearest to the mean, then always the one farthest from those chosen."""

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows in that order; `gain` is the distance to those before (of the first: that of the second)."""
        rows = self.rows(pool)
        unit_BK = unit_rows(self.matrix(pool, rows))
        first = int(product(unit_BK, unit_BK.mean(axis=0)).argmax())
        order, far = k_center(unit_BK, wanted(quota, pool, rows), first)
        far[0] = far[1] if len(far) > 1 else 0.0
        chosen = quota.fill(rows[order], pool.lengths_N)
        return Choice(chosen, gain=far[: len(chosen)], reason="at distance {gain} from the rows before it")
