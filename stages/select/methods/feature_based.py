"""Feature-based coverage: rows that together hold something of every feature, with diminishing returns.

Σᵤ g(Σ_{j∈S} xⱼᵤ), maximised greedily and exactly: within 1 − 1/e of the best. Features are taken at length one, and
each of them as two amounts, above zero and below, since amounts are at least 0. g is the square root or log(1 + x).
Memory: two numbers for each of the features, no pairs. Source: Wei, Liu, Kirchhoff & Bilmes 2014.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from stages.coreset.greedy import lazy_greedy
from stages.coreset.objectives import FeatureBased as Objective
from stages.coreset.similarity import unit_rows
from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


class FeatureBased(FeatureSelector):
    """Something of every feature."""

    concave: Literal["sqrt", "log"] = Field("sqrt", description="g, how returns diminish: √x, or log(1 + x).")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows by falling gain: how much more of the features the selection holds with each, by g."""
        rows = self.rows(pool)
        unit_BK = unit_rows(self.matrix(pool, rows))
        amount_BK = np.concatenate([np.maximum(unit_BK, 0.0), np.maximum(-unit_BK, 0.0)], axis=1)
        objective = Objective(amount_BK, {"sqrt": np.sqrt, "log": np.log1p}[self.concave])
        order, gain = lazy_greedy(objective, wanted(quota, pool, rows))
        chosen = quota.fill(rows[order], pool.lengths_N)
        return Choice(chosen, gain=gain[: len(chosen)], reason="adds {gain} to what is held of the features")
