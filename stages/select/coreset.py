"""What selectors over features share: which rows are looked at, their features at length one, how many are wanted."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.errors import BudgetError, ConfigError, InputError
from stages.coreset.greedy import Objective, lazy_greedy, stochastic_greedy
from stages.coreset.objectives import DenseFacilityLocation, SparseFacilityLocation
from stages.coreset.similarity import DENSE_BYTES, dense_cosine, fits_dense, nearest_cosine, unit_rows
from stages.select.quota import Quota
from stages.select.selector import Candidates, Selector


class FeatureSelector(Selector):
    """A selector that reads the features scoring left."""

    reads = frozenset({"features"})

    best: float = Field(
        1.0, gt=0, le=1, description="Share of the rows, best by score, among which is chosen; below 1 it reads scores."
    )

    def rows(self, pool: Candidates) -> np.ndarray:
        """Return the rows that may be chosen, ascending. Raises `ConfigError` where `best` needs scores."""
        rows = pool.usable(self.needs())
        if self.best == 1.0:
            return rows
        if pool.score_N is None:
            raise ConfigError(
                f"selector {self.name()} with `best` below 1 is given scores", "there are none", "score the pool first"
            )
        rows = rows[np.isfinite(pool.score_N[rows])]
        if not len(rows):
            raise InputError("at least one row with a feature and a score", "there is none", "look at the quarantine")
        order = np.argsort(-pool.score_N[rows], kind="stable")
        return np.sort(rows[order[: max(1, round(self.best * len(rows)))]])

    def matrix(self, pool: Candidates, rows_B: np.ndarray) -> np.ndarray:
        """Return feature_BK of these rows. Raises `ConfigError` where similarities were given in their place."""
        if pool.features is None:
            raise ConfigError(
                f"selector {self.name()} is given features",
                "it was given similarities",
                "give features, or use `facility_location` or `graph_cut`",
            )
        return pool.features.matrix(rows_B)

    def similarity(self, pool: Candidates, rows_B: np.ndarray) -> np.ndarray:
        """Return similarity_BB of these rows: as given, or the cosines of their features."""
        if pool.similarity_NN is not None:
            return pool.similarity_NN if len(rows_B) == len(pool) else pool.similarity_NN[np.ix_(rows_B, rows_B)]
        self.require_dense(len(rows_B))
        return dense_cosine(unit_rows(self.matrix(pool, rows_B)))

    def covering(
        self,
        pool: Candidates,
        rows_B: np.ndarray,
        count: int,
        neighbours: int,
        *,
        epsilon: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (positions in `rows_B`, gains) of facility location over the cosines of these rows, greedily.

        With `epsilon` above 0 by stochastic greedy, which draws from `rng`.
        """
        objective: Objective
        if pool.similarity_NN is None and not fits_dense(len(rows_B)):
            near = nearest_cosine(unit_rows(self.matrix(pool, rows_B)), neighbours)
            objective = SparseFacilityLocation(near)
        else:
            objective = DenseFacilityLocation(self.similarity(pool, rows_B))
        if epsilon and rng is not None:
            return stochastic_greedy(objective, count, rng, epsilon=epsilon)
        return lazy_greedy(objective, count)

    def require_dense(self, rows: int) -> None:
        """Raise `BudgetError` where the similarities of so many rows would not fit: this selector holds them all."""
        if not fits_dense(rows):
            raise BudgetError(
                f"selector {self.name()} compares at most {int((DENSE_BYTES / 4) ** 0.5)} rows, each with each",
                f"{rows} rows would take {4 * rows * rows / 1e9:.1f} GB",
                "lower `best` in `select.selector`, or use `facility_location`, which needs their neighbours alone",
            )


def wanted(quota: Quota, pool: Candidates, rows_B: np.ndarray) -> int:
    """Return how many of these rows the quota could take at the most."""
    if quota.rows is not None:
        return min(quota.rows, len(rows_B))
    if pool.lengths_N is None:
        return len(rows_B)  # `fill` says what is missing
    assert quota.tokens is not None
    shortest = np.sort(pool.lengths_N[rows_B]).cumsum(dtype=np.int64)
    return max(1, int(np.searchsorted(shortest, quota.tokens, side="right")))
