"""GradMatch: few rows with weights, whose gradients add up to the pool's mean gradient.

Orthogonal matching pursuit with weights of at least 0 on gradient features as they are; weights are scaled to a mean of
1. It ends where the error is small: more rows would only repeat what is matched. Source: Killamsetty et al. 2021.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.errors import InputError
from stages.coreset.matching_pursuit import pursuit
from stages.coreset.medoids import mean_one
from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


class GradMatch(FeatureSelector):
    """A weighted sum of few gradients near to the mean of all."""

    ridge: float = Field(0.5, ge=0, description="λ, relative to the mean squared norm of a gradient.")
    tolerance: float = Field(1e-4, ge=0, le=1, description="Relative error at which it ends.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows in the order taken; `gain` is how much of the mean gradient was still unmatched before."""
        rows = self.rows(pool)
        feature_BK = self.matrix(pool, rows).astype(np.float64)
        mean_K = feature_BK.mean(axis=0)
        if not mean_K.any():
            raise InputError(
                "a mean gradient that is not zero", "the features add up to zero", "choose another selector"
            )
        asked, ridge = (
            wanted(quota, pool, rows),
            self.ridge * float(np.square(feature_BK).sum(axis=1).mean()) / len(rows),
        )
        order: list[int] = []
        error_S = [1.0]
        for step in pursuit(feature_BK, mean_K, ridge=ridge):
            taken = rows[[*order, step.row]]
            if len(quota.fill(taken, pool.lengths_N)) < len(taken):
                asked = len(order)
                break
            order.append(step.row)
            error_S.append(step.error)
            weight_S = step.weight_S
            if len(order) == asked or step.error <= self.tolerance:
                break
        kept = weight_S > 0
        return Choice(
            rows[order][kept],
            gain=np.array(error_S[:-1])[kept],
            weights=mean_one(weight_S[kept]),
            reason="taken when {gain} of the mean gradient was unmatched",
            short="" if kept.sum() == asked else f"they match the mean gradient up to {error_S[-1]:.2g}",
        )
