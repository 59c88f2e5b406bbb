"""Full: every row is computed by the scorer. What every other coverage is measured against."""

from __future__ import annotations

from stages.score.cover import Coverage, Covered, Pool


class Full(Coverage):
    """One pass over the pool. Rows that an earlier commit of the same work computed are taken over (see `reuse.py`)."""

    whole = True

    def cover(self, pool: Pool) -> Covered:
        """Score all rows."""
        return Covered(pool.score("full").score())
