"""Graph cut: rows near to all others and unlike each other.

λ Σᵢ Σ_{j∈S} sᵢⱼ − Σ_{i,j∈S} sᵢⱼ with s = max(0, cosine), maximised greedily. A small λ prefers unlike rows, a large one
typical rows. Compares all pairs. Source: Iyer et al. 2021.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.errors import ConfigError
from stages.coreset.greedy import lazy_greedy
from stages.coreset.objectives import GraphCut as Objective
from stages.select.coreset import FeatureSelector, wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


class GraphCut(FeatureSelector):
    """Typical rows that do not repeat each other."""

    trade: float = Field(2.0, ge=2.0, description="λ: nearness to the pool against likeness inside the selection.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows by falling gain. Raises `BudgetError` for a pool too large to compare all pairs."""
        rows = self.rows(pool)
        similarity_BB = self.similarity(pool, rows)
        if not np.allclose(similarity_BB, similarity_BB.T):
            raise ConfigError(
                "graph_cut compares rows both ways alike",
                "the similarities given are not symmetric",
                "give symmetric ones, or use `facility_location`",
            )
        order, gain = lazy_greedy(Objective(similarity_BB, self.trade), wanted(quota, pool, rows))
        chosen = quota.fill(rows[order], pool.lengths_N)
        return Choice(chosen, gain=gain[: len(chosen)], reason="near to the pool, unlike those before it: gain {gain}")
