"""SemDeDup: the best rows by score, leaving out what means nearly the same as a row already kept.

Rows come by falling score; one whose features are within `epsilon` of a kept row's (cosine above 1 − epsilon) is left
out. Every row is compared with every kept row. What is left out is put behind what is kept: it is chosen only where the
quota asks for more. Source: Abbas et al. 2023, without its clusters, which only save comparisons.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.coreset.similarity import unit_rows
from stages.meter.products import product
from stages.select.coreset import FeatureSelector
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice

BLOCK_ROWS, KEPT_ROWS = 256, 16_384
"""Rows compared at once: with each other, and with kept ones."""


class Semdedup(FeatureSelector):
    """Top by score among rows that do not repeat each other."""

    reads = frozenset({"features", "scores"})
    supported = True

    epsilon: float = Field(0.1, gt=0, lt=1, description="Largest 1 − cosine at which two rows say the same.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return kept rows by falling score, then repetitions by falling score; `gain` is the score."""
        assert pool.score_N is not None
        rows = self.rows(pool)
        rows = rows[np.argsort(-pool.score_N[rows], kind="stable")]
        kept_B = first_of_their_kind(unit_rows(self.matrix(pool, rows)), 1 - self.epsilon)
        order = np.concatenate([rows[kept_B], rows[~kept_B]])
        chosen = quota.fill(order, pool.lengths_N)
        return Choice(chosen, gain=pool.score_N[chosen], reason="score {score}, the best of what says the same")


def first_of_their_kind(unit_BK: np.ndarray, most: float) -> np.ndarray:
    """Return whether each row's cosine with every kept row before it is at most `most`."""
    kept_B = np.zeros(len(unit_BK), dtype=bool)
    for start in range(0, len(unit_BK), BLOCK_ROWS):
        block_bK = unit_BK[start : start + BLOCK_ROWS]
        known_kK = unit_BK[:start][kept_B[:start]]
        new_b = np.ones(len(block_bK), dtype=bool)
        for at in range(0, len(known_kK), KEPT_ROWS):
            new_b &= product(block_bK, known_kK[at : at + KEPT_ROWS].T).max(axis=1) <= most
        alike_bb = product(block_bK, block_bK.T) > most
        for at in np.flatnonzero(new_b).tolist():
            kept_B[start + at] = not (alike_bb[at, :at] & kept_B[start : start + at]).any()
    return kept_B
