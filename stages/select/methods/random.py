"""Random: a uniform draw without replacement, the arm that every other selection is compared with.

The draw depends on the seed and on the number of rows; scores are not looked at. Keeps eight bytes a row for the order.
"""

from __future__ import annotations

import numpy as np

from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice, Selector


class Random(Selector):
    """Every subset of the size asked for is equally likely."""

    supported = True

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return rows in the order drawn."""
        order = rng.permutation(len(pool))
        return Choice(quota.fill(order, pool.lengths_N), reason="drawn at random")
