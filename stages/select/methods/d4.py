"""D4: repetitions are left out, then what is most typical of its cluster.

The features, at length one, are clustered by k-means. In a cluster rows are looked at from the farthest of its centre
inwards; the share `dedup` of the pool whose largest cosine with a row before it is smallest stays (SemDeDup: Abbas et
al. 2023). What stays is clustered anew, and of it the share `prototypes` farthest from its centre stays (Sorscher et
al. 2022). The quota is drawn at random from what stays; were it larger, typical rows follow, the least typical first,
then repetitions, the least alike first. Source: Tirumala et al. 2023 (D4), section 3.4, with its R_dedup of 0.75.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.coreset.clusters import k_means
from stages.coreset.similarity import unit_rows
from stages.meter.products import product
from stages.select.coreset import FeatureSelector
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice

BLOCK_ROWS = 512
KEPT, TYPICAL, REPEATED = range(3)


class D4(FeatureSelector):
    """Random among rows that neither repeat another nor are typical."""

    dedup: float = Field(0.75, gt=0, le=1, description="R_dedup: share of the rows that stays after repetitions go.")
    prototypes: float = Field(0.75, gt=0, le=1, description="R_proto: share of those that stays after the typical go.")
    clusters: int | None = Field(None, ge=1, description="Of k-means; unset is the square root of the rows.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return what stays in the order drawn, then the rest."""
        rows = self.rows(pool)
        unit_BK = unit_rows(self.matrix(pool, rows))
        clusters = self.clusters or max(1, round(len(rows) ** 0.5))
        alike_B = nearest_before(unit_BK, *k_means(unit_BK, clusters, rng))
        by_likeness = np.argsort(alike_B, kind="stable")
        stays = np.sort(by_likeness[: max(1, round(self.dedup * len(rows)))])
        _, square_b = k_means(unit_BK[stays], clusters, rng)
        outwards = stays[np.argsort(-square_b, kind="stable")]
        kept = max(1, round(self.prototypes * len(stays)))
        order = np.concatenate([rng.permutation(outwards[:kept]), outwards[kept:], by_likeness[len(stays) :]])
        kind_B = np.repeat([KEPT, TYPICAL, REPEATED], [kept, len(stays) - kept, len(rows) - len(stays)])
        chosen = quota.fill(rows[order], pool.lengths_N)
        return Choice(
            chosen,
            reason="{group}",
            group=kind_B[: len(chosen)],
            groups=("drawn from rows neither repeated nor typical", "typical of its cluster", "much like another row"),
        )


def nearest_before(unit_BK: np.ndarray, label_B: np.ndarray, square_B: np.ndarray) -> np.ndarray:
    """Return each row's largest cosine with a row of its cluster that is farther from the centre; −1 for the farthest.

    Of rows equally far the smaller is before.
    """
    alike_B = np.full(len(unit_BK), -1.0, dtype=np.float32)
    inwards = np.lexsort((-square_B, label_B))
    for members in np.split(inwards, np.bincount(label_B).cumsum()[:-1]):
        member_mK = unit_BK[members]
        for start in range(0, len(members), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(members))
            cosine_bm = product(member_mK[start:stop], member_mK[:stop].T)
            later = np.arange(stop)[None, :] >= np.arange(start, stop)[:, None]
            cosine_bm[later] = -1.0
            alike_B[members[start:stop]] = cosine_bm.max(axis=1)
    return alike_B
