"""Trajectory clusters (S2L): rows whose losses went down alike stand for each other, so each such cluster gives some.

Reads the columns of the scorer `learning_trajectory`: a row's loss at several moments of training, of a small model
say. In each source the trajectories are clustered by k-means; the sources, and in each its clusters, give equally many
rows while they have them, the smallest whole. Rows of a cluster are drawn at random; rows of clusters smaller than
`smallest` come when the source has no others. Source: Yang et al. 2024 (S2L), algorithm 1 and its published settings:
100 clusters, 20 iterations, Euclidean distance of the losses as they are. There the first moment, where losses differ
most, decides most; `scaled` brings every moment to one spread first (ours, not the paper's).
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.coreset.clusters import k_means
from stages.coreset.turns import in_turns
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice, Selector
from stages.select.sources import coded


class TrajectoryClusters(Selector):
    """Equal shares of the sources, and in each of the clusters of its loss trajectories."""

    reads = frozenset({"groups"})
    supported = True

    clusters: int = Field(100, ge=1, description="Clusters of a source, at most as many as different trajectories.")
    iterations: int = Field(20, ge=1, description="Most iterations of k-means.")
    smallest: int = Field(3, ge=1, description="Rows of a cluster below which it is taken from last.")
    scaled: bool = Field(False, description="Whether losses of a moment are brought to deviation 1 over the pool.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows, sources in turns and in each its clusters in turns."""
        assert pool.column_NJ is not None
        rows = rng.permutation(pool.usable(self.reads))
        loss_BJ = pool.column_NJ[rows].astype(np.float64)
        if self.scaled:
            spread_J = loss_BJ.std(axis=0)
            loss_BJ /= np.where(spread_J > 0, spread_J, 1.0)
        source_B, names = coded(pool.sources, rows)
        order, cluster_B = np.empty(0, dtype=np.int64), np.empty(len(rows), dtype=np.int64)
        for source in range(len(names)):
            here = np.flatnonzero(source_B == source)
            if not len(here):
                continue
            cluster_B[here], _ = k_means(loss_BJ[here], self.clusters, rng, iterations=self.iterations)
            late_b = np.bincount(cluster_B[here])[cluster_B[here]] < self.smallest
            for part in (here[~late_b], here[late_b]):
                order = np.concatenate([order, part[in_turns(np.unique(cluster_B[part], return_inverse=True)[1])]])
        order = order[in_turns(source_B[order])]
        chosen = quota.fill(rows[order], pool.lengths_N)
        return Choice(
            chosen,
            reason="drawn from a cluster of loss trajectories of {group}",
            group=source_B[order[: len(chosen)]],
            groups=names,
        )
