"""LIMA's recipe: the good rows of every source, equally many of each, unlike each other.

In each source only rows at or above the `quality` quantile of its scores stay; sources give equally many, or by their
share; in a source rows come by facility location, so that the few stand for all good ones. LIMA (Zhou et al. 2023)
chose by hand; this is its protocol as a rule, no method of that paper. Memory: all pairs of a source up to 11,585 rows.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from stages.coreset.turns import in_turns
from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice
from stages.select.sources import coded


class Lima(FeatureSelector):
    """Quality within the source, a quota of each source, diversity inside it."""

    reads = frozenset({"features", "scores"})

    quality: float = Field(0.7, ge=0, lt=1, description="Quantile of a source's scores below which a row is left out.")
    budget: Literal["equal", "proportional"] = Field(
        "equal", description="Rows of a source: as many as of the others while it has them, or by its share."
    )
    neighbours: int = Field(64, ge=1, le=4096, description="Nearest rows that one of a large source is compared with.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows, sources in turns; `gain` is how much nearer the source's good rows came to the selection."""
        assert pool.score_N is not None
        rows = self.rows(pool)
        source_B, names = coded(pool.sources, rows)
        size_G = np.bincount(source_B, minlength=len(names))
        most = wanted(quota, pool, rows)
        order, gains, left = [], [], 0
        for source in np.flatnonzero(size_G).tolist():
            here = np.flatnonzero(source_B == source)
            score_b = pool.score_N[rows[here]]
            good = here[score_b >= np.quantile(score_b, self.quality, method="higher")]
            left += len(here) - len(good)
            found, gain = self.covering(pool, rows[good], min(most, len(good)), self.neighbours)
            order.append(good[found])
            gains.append(gain)
        ranked, gain_B = np.concatenate(order), np.concatenate(gains)
        turns = in_turns(source_B[ranked], size_G if self.budget == "proportional" else None)
        ranked, gain_B = ranked[turns], gain_B[turns]
        chosen = quota.fill(rows[ranked], pool.lengths_N)
        ended = left > 0 and len(chosen) == len(ranked) and quota.wants_more(chosen, pool.lengths_N)
        return Choice(
            chosen,
            gain=gain_B[: len(chosen)],
            reason="score {score}, among the best of {group}, and brings those nearer to the selection by {gain}",
            group=source_B[ranked[: len(chosen)]],
            groups=names,
            short="the others score below the `quality` quantile of their source" if ended else "",
        )
