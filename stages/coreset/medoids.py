"""Medoids of groups (CoLM): rows that stand for their group, as many as its share, and how many each stands for.

Some groups are taken whole. In each of the others facility location over d_max − ‖gᵢ − gⱼ‖₁, on the dimensions where
the group's mean is largest, ranks the rows; the groups are then served in turns by their size. Source: Nguyen et al.
2025 (CoLM). Compares all pairs of a group. Imports no torch. Shapes: B rows, K numbers a row, G groups, b rows of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from stages.coreset.greedy import lazy_greedy
from stages.coreset.objectives import DenseFacilityLocation
from stages.coreset.turns import in_turns


@dataclass(frozen=True)
class Medoids:
    """Rows in the order in which they are taken.

    Attributes:
        ranked: rows, those of whole groups first.
        group_B: the group of every row.
        near: by group that is not whole, the nearness of its ranked rows to all of its rows, (ranked, b).
    """

    ranked: np.ndarray
    group_B: np.ndarray
    near: dict[int, np.ndarray]

    def stood_for(self, count: int) -> np.ndarray:
        """Return how many rows of its group are nearest to each of the first `count` ranked rows; float64.

        A row of a whole group stands for itself; 0 is a row that is as near to all as one before it.
        """
        group_S = self.group_B[self.ranked[:count]]
        stands_S = np.ones(len(group_S))
        for group, near in self.near.items():
            taken = np.flatnonzero(group_S == group)
            if len(taken):
                nearest_b = near[: len(taken)].argmax(axis=0)
                stands_S[taken] = np.bincount(nearest_b, minlength=len(taken))
        return stands_S


def medoids(feature_BK: np.ndarray, group_B: np.ndarray, whole_G: np.ndarray, dimensions: int, most: int) -> Medoids:
    """Return at least the first `most` medoids, or all rows where there are fewer.

    Args:
        feature_BK: the rows' gradients.
        group_B: the group of each row, int64 from 0.
        whole_G: which groups are taken whole.
        dimensions: numbers of a gradient that count in its group.
        most: rows that may be taken.
    """
    size_G = np.bincount(group_B, minlength=len(whole_G))
    found, near = [np.empty(0, dtype=np.int64)], dict[int, np.ndarray]()
    for group in np.flatnonzero((size_G > 0) & ~whole_G).tolist():
        here = np.flatnonzero(group_B == group)
        nearness_bb = nearness_l1(feature_BK[here], dimensions)
        order, _ = lazy_greedy(DenseFacilityLocation(nearness_bb), min(most, len(here)))
        near[group] = nearness_bb[order]
        found.append(here[order])
    rest = np.concatenate(found)
    ranked = np.concatenate([np.flatnonzero(whole_G[group_B]), rest[in_turns(group_B[rest], size_G)]])
    return Medoids(ranked, group_B, near)


def nearness_l1(feature_bK: np.ndarray, dimensions: int) -> np.ndarray:
    """Return d_max − L1 distance of every pair, (b, b) float32, on the dimensions of the largest mean size."""
    if dimensions < feature_bK.shape[1]:
        largest = np.argsort(-np.abs(feature_bK.mean(axis=0, dtype=np.float64)), kind="stable")[:dimensions]
        feature_bK = feature_bK[:, np.sort(largest)]
    distance_bb = cdist(feature_bK, feature_bK, "cityblock")
    return (distance_bb.max() - distance_bb).astype(np.float32)


def mean_one(weight_S: np.ndarray) -> np.ndarray:
    """Return weights scaled to a mean of 1, so that the learning rate keeps its meaning."""
    return np.asarray(weight_S * (len(weight_S) / weight_S.sum()))
