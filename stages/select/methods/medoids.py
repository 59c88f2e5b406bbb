"""Medoids (CoLM): rows that stand for their source, as many as its share, weighted by the rows they stand for.

Small sources are taken whole. In each of the others facility location over d_max − ‖gᵢ − gⱼ‖₁, on the `dimensions`
where the source's mean gradient is largest, chooses rows in proportion to the source's size; a row's weight is the
number of rows of its source that are nearest to it, scaled to a mean of 1. Source: Nguyen et al. 2025 (CoLM), for the
rows of a large batch; here of the whole pool, on the features that scoring left. Compares all pairs of a source.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field
from scipy.spatial.distance import cdist

from stages.coreset.greedy import lazy_greedy
from stages.coreset.objectives import DenseFacilityLocation
from stages.select.coreset import FeatureSelector, mean_one, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice
from stages.select.turns import coded, in_turns


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
        feature_BK, most = self.matrix(pool, rows), wanted(quota, pool, rows)
        whole_G = size_G <= self.small * len(rows)
        found: dict[int, np.ndarray] = {}
        near: dict[int, np.ndarray] = {}
        for source in np.flatnonzero((size_G > 0) & ~whole_G).tolist():
            here = np.flatnonzero(source_B == source)
            near[source] = nearness_l1(feature_BK[here], self.dimensions)
            order, _ = lazy_greedy(DenseFacilityLocation(near[source]), min(most, len(here)))
            near[source] = near[source][order]
            found[source] = here[order]
        first = np.flatnonzero(whole_G[source_B])
        rest = np.concatenate([np.empty(0, dtype=np.int64), *found.values()])
        ranked = np.concatenate([first, rest[in_turns(source_B[rest], size_G)]])
        chosen = quota.fill(rows[ranked], pool.lengths_N)
        ranked = ranked[: len(chosen)]
        weight_B = np.ones(len(rows))
        for source, order in found.items():
            taken = int((source_B[ranked] == source).sum())
            if taken:
                nearest = near[source][:taken].argmax(axis=0)
                weight_B[order[:taken]] = np.bincount(nearest, minlength=taken)
        weight_S = weight_B[ranked]
        kept = weight_S > 0  # an equal row before it stands for all that it would
        return Choice(
            chosen[kept],
            weights=mean_one(weight_S[kept]),
            reason="stands for rows of {group}",
            group=source_B[ranked[kept]],
            groups=names,
            short="" if kept.all() else "the others repeat a gradient that was chosen",
        )


def nearness_l1(feature_bK: np.ndarray, dimensions: int) -> np.ndarray:
    """Return d_max − L1 distance of every pair, (b, b) float32, on the dimensions of the largest mean size."""
    if dimensions < feature_bK.shape[1]:
        largest = np.argsort(-np.abs(feature_bK.mean(axis=0, dtype=np.float64)), kind="stable")[:dimensions]
        feature_bK = feature_bK[:, np.sort(largest)]
    distance_bb = cdist(feature_bK, feature_bK, "cityblock")
    return (distance_bb.max() - distance_bb).astype(np.float32)
