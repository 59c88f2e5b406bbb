"""Speculative: a cheap scorer scores every row, the scorer verifies a stratified sample and corrects it.

Strata are intervals of equal width over the cheap scores, so that the thin ends are verified as closely as the middle.
A row that is not verified gets its stratum's mean of the verified rows, plus the deviation of its own cheap score times
one slope fitted over the sample (the combined regression estimator of survey sampling). Source: STAFF (Zhang et al.
2024), which multiplies by the ratio of the two means: the same at a stratum's middle, but for scores of one sign only.
Its proxy is a smaller model of the family; here it is any scorer. Its share of hard rows is left out by the selector.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from pydantic import Field

from data_contracts.config import MethodSettings
from data_contracts.method import resolve
from stages.score.cover import Coverage, Covered, Pool, refuse_unsampled
from stages.score.scorer import Scorer
from stages.statistics.rank import spearman


class Speculative(Coverage):
    """Cheap scores, corrected stratum by stratum from at most `strata` x `sample` computed rows."""

    proxy: MethodSettings = Field(
        default_factory=lambda: {"method": "el2n"}, description="The cheap scorer and its settings."
    )
    strata: int = Field(50, ge=1, description="Intervals of equal width over the cheap scores.")
    sample: int = Field(10, ge=1, description="Rows computed in each; a smaller stratum is computed whole.")

    @cached_property
    def cheap(self) -> Scorer:
        """The proxy as a scorer."""
        return resolve(Scorer, self.proxy, "score.coverage.proxy")

    def others(self) -> Iterable[Scorer]:
        """Return the proxy."""
        return [self.cheap]

    def check(self, method: Scorer) -> None:
        """Refuse a scorer of which a sample says nothing, and a proxy that is none."""
        super().check(method)
        refuse_unsampled(method, self.name())

    def cover(self, pool: Pool) -> Covered:
        """Score all rows cheaply, a sample exactly, and correct the rest."""
        cheap_N = self.cheap.finish(pool.score("proxy", method=self.cheap).score()).astype(np.float64)
        stratum_N = self._strata(cheap_N)
        rng = pool.rng("speculative")
        drawn = [np.flatnonzero(stratum_N < 0)]  # what the proxy could not score, the scorer may
        for stratum in np.unique(stratum_N[stratum_N >= 0]):
            members = np.flatnonzero(stratum_N == stratum)
            drawn.append(rng.choice(members, min(self.sample, len(members)), replace=False))
        rows = np.sort(np.concatenate(drawn))
        exact = pool.score("sample", rows)
        column_nJ = exact.columns()
        known = np.isfinite(column_nJ).all(axis=1) & (stratum_N[rows] >= 0)
        predicted_NJ = np.full((len(pool), column_nJ.shape[1]), np.nan, dtype=np.float32)
        found = None
        if known.any():
            fit = _Fit(cheap_N[rows[known]], stratum_N[rows[known]], column_nJ[known].astype(np.float64))
            rest = np.setdiff1d(np.flatnonzero(stratum_N >= 0), rows)
            predicted_NJ[rest] = fit.of(cheap_N[rest], stratum_N[rest])
            found = spearman(fit.left_out().mean(axis=1), column_nJ[known].mean(axis=1))
        score_N = pool.combined(predicted_NJ)
        score_N[rows] = exact.score()
        facts = {"verified": len(rows), "left_out_spearman": None if found is None else round(found, 4)}
        return Covered(score_N, predicted_NJ, facts=facts)

    def _strata(self, cheap_N: np.ndarray) -> np.ndarray:
        """Return each row's stratum, −1 where it has no cheap score."""
        here = np.isfinite(cheap_N)
        found = np.full(len(cheap_N), -1)
        if here.any():
            low, high = cheap_N[here].min(), cheap_N[here].max()
            place = (cheap_N[here] - low) / ((high - low) or 1.0) * self.strata
            found[here] = np.minimum(place.astype(np.int64), self.strata - 1)
        return found


class _Fit:
    """Stratum means and one slope a column, from the verified rows; an unverified stratum takes the nearest one's."""

    def __init__(self, cheap_n: np.ndarray, stratum_n: np.ndarray, exact_nJ: np.ndarray) -> None:
        self._strata, self._code = np.unique(stratum_n, return_inverse=True)
        self._counts = np.bincount(self._code)
        self._cheap = self._means(cheap_n[:, None])
        self._exact = self._means(exact_nJ)
        self._x, self._y = cheap_n[:, None], exact_nJ
        centred = self._x - self._x.mean()
        self._slope_J = (centred * (exact_nJ - exact_nJ.mean(axis=0))).sum(axis=0) / ((centred**2).sum() or 1.0)

    def _means(self, values: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(self._strata), values.shape[1]))
        np.add.at(sums, self._code, values)
        return sums / self._counts[:, None]

    def of(self, cheap_n: np.ndarray, stratum_n: np.ndarray) -> np.ndarray:
        """Return the estimates of rows by their cheap scores and strata."""
        right = np.clip(np.searchsorted(self._strata, stratum_n), 0, len(self._strata) - 1)
        left = np.maximum(right - 1, 0)
        nearer = np.abs(self._strata[left] - stratum_n) < np.abs(self._strata[right] - stratum_n)
        at = np.where(nearer, left, right)
        return self._exact[at] + self._slope_J * (cheap_n[:, None] - self._cheap[at])

    def left_out(self) -> np.ndarray:
        """Return the estimate of each verified row from the others of its stratum; one that was alone: by the slope."""
        count = self._counts[self._code][:, None]
        several, others = count > 1, np.maximum(count - 1, 1)
        mean_y = np.where(several, (self._exact[self._code] * count - self._y) / others, self._y.mean(axis=0))
        mean_x = np.where(several, (self._cheap[self._code] * count - self._x) / others, self._x.mean())
        return mean_y + self._slope_J * (self._x - mean_x)
