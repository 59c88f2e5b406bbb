"""Speculative strata: random rows of every interval of scores, more where verification found the rows to be worth more.

For scores of the coverage `speculative`, which predicts most rows and computes a sample of each interval. The hardest
`drop` of the rows is left out; the rest is cut into `strata` of equal width, and a stratum's budget is in proportion to
the mean of its computed scores (a stratum without one takes the nearest's; a mean below zero counts as none), what a
small stratum cannot use going to the others. Source: STAFF (Zhang et al. 2024), algorithm 1. STAFF's weight is that
mean over the mean of the small model's scores; the scores hold the corrected estimates alone, so the mean itself is
taken: strata that matter more to the model get more, where STAFF gives more to those that it had underestimated.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from data_contracts.errors import ConfigError, InputError
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice, Selector
from stages.select.strata import in_strata, named, stratum_of, without_highest


class SpeculativeStrata(Selector):
    """Strata of predicted scores with budgets by what was verified."""

    reads = frozenset({"scores"})

    strata: int = Field(50, ge=1, le=100_000, description="Intervals of equal width over the scores.")
    drop: float = Field(0.1, ge=0, lt=1, description="Share of the rows, those with the highest scores, left out.")
    within: Literal["random", "top"] = Field("random", description="Which rows of a stratum: drawn, or the highest.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows, the strata in turns by their budgets.

        Raises `ConfigError` where it is not known which scores were computed, `InputError` where none left was.
        """
        assert pool.score_N is not None
        if pool.exact_N is None:
            raise ConfigError(
                "selector speculative_strata is told which scores were computed",
                "the scores do not say",
                "give a column `exact`, or use `stratified`",
            )
        rows = pool.usable(self.reads)
        rows = rng.permutation(rows[without_highest(pool.score_N[rows], self.drop)])
        score_B, exact_B = pool.score_N[rows].astype(np.float64), pool.exact_N[rows]
        if not exact_B.any():
            raise InputError("computed scores in the strata", "all are predicted", "raise `score.coverage.sample`")
        stratum_B = stratum_of(score_B, self.strata, "width")
        worth_B = _worth(stratum_B, score_B, exact_B)
        group_B, names = named(score_B, stratum_B)
        weight_G = np.zeros(len(names))
        weight_G[group_B] = worth_B
        if self.within == "top":
            highest = np.argsort(-score_B, kind="stable")
            rows, group_B = rows[highest], group_B[highest]
        return in_strata(
            rows,
            group_B,
            names,
            weight_G if weight_G.any() else None,
            pool,
            quota,
            "score {score}, of the stratum {group}",
            dropped=self.drop > 0,
        )


def _worth(stratum_B: np.ndarray, score_B: np.ndarray, exact_B: np.ndarray) -> np.ndarray:
    """Return, for each row, the mean computed score of its stratum or of the nearest that has one, at least 0."""
    known, code = np.unique(stratum_B[exact_B], return_inverse=True)
    mean = np.bincount(code, weights=score_B[exact_B]) / np.bincount(code)
    nearest = np.abs(stratum_B[:, None] - known[None, :]).argmin(axis=1)
    return np.asarray(np.maximum(mean[nearest], 0.0))
