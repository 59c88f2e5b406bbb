"""A determinantal point process: rows that are good by score and together span as much as they can.

Greedy on log det of L = diag(q) X Xᵀ diag(q), X the features at length one and q = exp(strength · z / 2) of the scores'
z; strength 0 asks for diversity alone. At most as many rows as features have numbers can be chosen. Source: Kulesza &
Taskar 2012; Chen, Zhang & Zhou 2018 for the algorithm.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.errors import ConfigError, InputError
from stages.coreset.similarity import unit_rows
from stages.coreset.spread import dpp_map
from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice

LOWEST = 300.0
"""Beyond this much below the best, quality counts as equal: its square would not be a number above 0."""


class Dpp(FeatureSelector):
    """The likeliest set, found greedily."""

    strength: float = Field(0.0, ge=0, description="How much a score counts, against diversity; above 0 reads scores.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows by falling gain in log-determinant."""
        rows = self.rows(pool)
        quality_B = np.ones(len(rows))
        if self.strength:
            if pool.score_N is None:
                raise ConfigError("`strength` above 0 is given scores", "there are none", "score the pool first")
            rows = rows[np.isfinite(pool.score_N[rows])]
            if not len(rows):
                raise InputError(
                    "at least one row with a feature and a score", "there is none", "look at the quarantine"
                )
            score_B = pool.score_N[rows].astype(np.float64)
            spread = float(score_B.std()) or 1.0
            lower_B = self.strength * (score_B.max() - score_B) / spread / 2
            quality_B = np.exp(-np.minimum(lower_B, LOWEST))
        asked = wanted(quota, pool, rows)
        order, gain = dpp_map(unit_rows(self.matrix(pool, rows)), quality_B, asked)
        if not len(order):
            raise InputError("a feature that is not zero", "all are", "look at the scorer, or choose another selector")
        chosen = quota.fill(rows[order], pool.lengths_N)
        short = "the others lie in the span of these, whose set has probability zero with any more"
        return Choice(
            chosen,
            gain=gain[: len(chosen)],
            reason="adds {gain} to the log-determinant",
            short=short if len(order) < asked else "",
        )
