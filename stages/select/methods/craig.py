"""CRAIG: rows whose gradients, each weighted by how many it stands for, add up to nearly the pool's gradient.

Facility location over d_max − ‖gᵢ − gⱼ‖ on gradient features as they are (not at length one); a row's weight is the
number of rows nearest to it, scaled to a mean of 1. Compares all pairs. Source: Mirzasoleiman, Bilmes & Leskovec 2020.
"""

from __future__ import annotations

import numpy as np

from stages.coreset.greedy import lazy_greedy
from stages.coreset.medoids import mean_one
from stages.coreset.objectives import DenseFacilityLocation
from stages.meter.products import product
from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


def nearness(feature_BK: np.ndarray) -> np.ndarray:
    """Return d_max − distance of every pair, (B, B) float32."""
    feature_BK = feature_BK - feature_BK.mean(axis=0, dtype=np.float64)  # distances stay, and do not cancel
    square_B = np.einsum("bk,bk->b", feature_BK, feature_BK, dtype=np.float64)
    near_BB = product(feature_BK, feature_BK.T).astype(np.float32)
    near_BB *= -2.0
    near_BB += square_B[:, None].astype(np.float32)
    near_BB += square_B[None, :].astype(np.float32)
    np.maximum(near_BB, 0.0, out=near_BB)
    np.fill_diagonal(near_BB, 0.0)
    np.sqrt(near_BB, out=near_BB)
    return np.subtract(near_BB.max(), near_BB, out=near_BB)


class Craig(FeatureSelector):
    """A weighted coreset of gradients."""

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows and weights. Raises `BudgetError` for a pool too large to compare all pairs."""
        rows = self.rows(pool)
        self.require_dense(len(rows))
        near_BB = nearness(self.matrix(pool, rows))
        order, gain = lazy_greedy(DenseFacilityLocation(near_BB), wanted(quota, pool, rows))
        chosen = quota.fill(rows[order], pool.lengths_N)
        order = order[: len(chosen)]
        stands_for = np.bincount(near_BB[order].argmax(axis=0), minlength=len(order)).astype(np.float64)
        kept = stands_for > 0  # an equal row before it stands for all that it would
        return Choice(
            chosen[kept],
            gain=gain[: len(chosen)][kept],
            weights=mean_one(stands_for[kept]),
            reason="brings the gradients nearer to the selection by {gain}",
            short="" if kept.all() else "the others repeat a gradient that was chosen",
        )
