"""Top-k: the rows with the highest scores.

Ties go to the smaller example id, so the choice is a function of the scores alone. Keeps eight bytes a row for the
order.
"""

from __future__ import annotations

import numpy as np

from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice, Selector


class TopK(Selector):
    """The best by score; rows without a valid score are never chosen."""

    reads = frozenset({"scores"})
    supported = True

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows by falling score; `gain` is the score."""
        assert pool.score_N is not None
        valid = pool.scorable
        order = valid[np.argsort(-pool.score_N[valid], kind="stable")]
        rows = quota.fill(order, pool.lengths_N)
        return Choice(rows, gain=pool.score_N[rows], reason="score {score}, rank {rank} of the pool")
