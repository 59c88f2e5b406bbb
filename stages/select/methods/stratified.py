"""Stratified: rows drawn from every interval of scores, so that easy and hard ones are there together.

Scores are cut into `strata` of equal width, or of equally many rows; each gives equally many rows, drawn at random, or
as many as its share. The highest `drop` of the scores is left out before: where a score is a difficulty, the hardest
rows are where wrong answers stand. With equal width and equal budgets this is Coverage-centric Coreset Selection
(Zheng et al. 2023, algorithm 1), whose β is `drop`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice, Selector
from stages.select.strata import in_strata, named, stratum_of, without_highest


class Stratified(Selector):
    """Random rows of every stratum of the scores."""

    reads = frozenset({"scores"})

    strata: int = Field(50, ge=1, le=100_000, description="Intervals of the scores; empty ones have no budget.")
    cut: Literal["width", "quantile"] = Field("width", description="Intervals of equal width, or of equally many rows.")
    budget: Literal["equal", "proportional"] = Field(
        "equal", description="Rows of a stratum: as many as of the others while it has them, or by its share."
    )
    drop: float = Field(0.0, ge=0, lt=1, description="Share of the rows, those with the highest scores, left out.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows, the strata in turns."""
        assert pool.score_N is not None
        rows = pool.usable(self.reads)
        rows = rng.permutation(rows[without_highest(pool.score_N[rows], self.drop)])
        score_B = pool.score_N[rows]
        group_B, names = named(score_B, stratum_of(score_B, self.strata, self.cut))
        weight_G = np.bincount(group_B) if self.budget == "proportional" else None
        return in_strata(
            rows,
            group_B,
            names,
            weight_G,
            pool,
            quota,
            "score {score}, drawn from the scores {group}",
            dropped=self.drop > 0,
        )
