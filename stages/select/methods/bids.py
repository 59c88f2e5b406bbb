"""BIDS: the next row is the one that does most for the target group served least.

Each group's column of scores is brought to mean 0 and deviation 1, so that no group counts more for its scale; then
always the row with the largest max_j (A'ᵢⱼ − mean over the chosen of A'ₖⱼ) is taken. O(N·J) a row. Source: Dai et al.
2025 (arXiv 2501.12147), the form of its section 3 with groups in the place of single validation rows.
"""

from __future__ import annotations

import numpy as np

from stages.select.coreset import wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice, Selector


class Bids(Selector):
    """Balanced influence over target groups."""

    reads = frozenset({"groups"})

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows in the order taken; `gain` is how far each was above those before, in its group."""
        assert pool.column_NJ is not None
        rows = pool.usable(self.reads)
        column_BJ = pool.column_NJ[rows].astype(np.float64)
        spread_J = column_BJ.std(axis=0)
        column_BJ = (column_BJ - column_BJ.mean(axis=0)) / np.where(spread_J > 0, spread_J, 1.0)
        order, gain = balanced(column_BJ, wanted(quota, pool, rows))
        chosen = quota.fill(rows[order], pool.lengths_N)
        return Choice(
            chosen,
            gain=gain[: len(chosen)],
            reason="{gain} deviations above those before it, in its group",
        )


def balanced(column_BJ: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, gains) of the rule above; ties go to the smaller row."""
    left_BJ = column_BJ.copy()
    sum_J = np.zeros(column_BJ.shape[1])
    rows, gains = np.empty(count, dtype=np.int64), np.empty(count)
    for step in range(count):
        best_B = (left_BJ - sum_J / max(step, 1)).max(axis=1)
        row = int(best_B.argmax())
        rows[step], gains[step] = row, best_B[row]
        sum_J += column_BJ[row]
        left_BJ[row] = -np.inf
    return rows, gains
