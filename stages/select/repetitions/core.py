"""Core: the first rows of a ranking several times, further rows once, within the same tokens.

Where the budget visits what is surely worth it more often than repeating teaches, the rest of it goes to the next best
rows instead. Training spreads the visits of a row over the pass (stages/train/order.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pydantic import Field

from stages.select.quota import Quota
from stages.select.repetition import Repetition, lengths_of, tokens_of_visits, visits_each
from stages.select.selector import Candidates, Choice

ROUNDED = 1e-6
"""Tokens are whole; what is less than this is rounding."""


class Core(Repetition):
    """A share of the pool is visited `visits` times a pass, what the quota has left once."""

    supported = True

    share: float = Field(0.1, gt=0, le=1, description="Of the pool's rows: the core, the first of the ranking.")
    visits: float = Field(4.0, ge=1, description="Of a row of the core in a pass.")

    def repeat(self, pool: Candidates, quota: Quota, choice: Choice, passes: float) -> tuple[Choice, None]:
        """Return the core and as many further rows as the quota has tokens left for; no curve.

        A quota that does not visit the core so often visits it alone, as often as it can, at least once.
        """
        unique_K = np.cumsum(lengths_of(pool, choice), dtype=np.int64)
        budget = tokens_of_visits(quota, choice, unique_K)
        core = min(len(choice.rows), max(1, round(self.share * len(pool))))
        once = float(unique_K[core - 1])
        visits = max(1.0, min(self.visits, budget / once))
        rest = budget - visits * once
        kept = max(core, int(np.searchsorted(unique_K, once + rest + ROUNDED, side="right")))
        repeats = np.ones(kept, dtype=np.int32)
        repeats[:core] = visits_each(unique_K[:core], visits, ROUNDED)
        return replace(choice.first(kept), repeats=repeats, short=""), None
