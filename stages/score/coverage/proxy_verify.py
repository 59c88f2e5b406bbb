"""Proxy-verify: after the first round most rows are predicted, and those that would be selected are verified.

Every row is looked at briefly at the fresh checkpoint (see `glance.py`) and a stratified sample is computed whole. A
ridge regression from the glance, and from what earlier rounds stored where that helps, predicts the rest; its error is
cross-validated over the sample. Scores have heavy tails, so it works on asinh(score / median |score|). Then the rows
that the predictions put among the best are computed, best first, and take the places that they really have, until the
best are all computed or the tokens allowed are used. Where the rank correlation with full scoring is estimated below
`least`, the rest is computed too. The first round computes all rows.

The estimate is e + (1 − e) r: r the cross-validated rank correlation over the sample, e the share of computed rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from stages.score.cover import Coverage, Covered, Pool, refuse_unsampled
from stages.statistics.rank import spearman
from stages.statistics.ridge import cross_validated, fit

if TYPE_CHECKING:
    from stages.score.passes import ScorePass
    from stages.score.scorer import Scorer

LEAST_SAMPLE = 24
"""Rows below which nothing is predicted: cross-validation on fewer says little."""
FOLDS = 10


class ProxyVerify(Coverage):
    """A glance at all rows, a sample and the would-be selected computed, the rest predicted."""

    tokens: float = Field(0.27, gt=0, le=1, description="Share of the pool's tokens at which verifying ends.")
    glance: float = Field(0.18, gt=0, lt=1, description="Share of the pool's tokens that the glance takes.")
    sample: float = Field(0.08, gt=0, lt=1, description="Share of the rows computed to fit and to judge the predictor.")
    verify: float = Field(0.1, ge=0, le=1, description="Best rows that are verified: the share that will be selected.")
    least: float = Field(
        0.9, ge=-1, le=1, description="Estimated rank correlation with full scoring below which all is computed."
    )

    def check(self, method: Scorer) -> None:
        """Refuse a scorer of which a sample says nothing."""
        refuse_unsampled(method, self.name())

    def cover(self, pool: Pool) -> Covered:
        """Predict and verify, or compute all rows."""
        count = math.ceil(self.sample * len(pool))
        earlier = next((scoring for scoring in pool.previous()), None)
        if earlier is None or count < LEAST_SAMPLE:
            if earlier is not None:
                pool.notice(f"proxy_verify: a sample of {count} rows is too small to predict from; all are computed")
            return Covered(pool.score("full").score(), facts={"predicted": 0})
        seen = pool.score("glance", glance=pool.glance(self.glance))
        return _Prediction(self, pool, seen, earlier.group_NJ, earlier.loss_N).made(count)


class _Prediction:
    """One round: what is known of each row so far."""

    def __init__(
        self, settings: ProxyVerify, pool: Pool, seen: ScorePass, before_NJ: np.ndarray, loss_N: np.ndarray
    ) -> None:
        self.settings, self.pool = settings, pool
        self.seen_NJ = seen.columns().astype(np.float64)
        self.before_NJ = before_NJ.astype(np.float64)
        self.plain_NK = np.stack([loss_N, pool.lengths_N, pool.answers_N], axis=1).astype(np.float64)
        self.score_N = np.full(len(pool), np.nan, dtype=np.float32)
        self.known_N = np.zeros(len(pool), dtype=bool)
        self.left = settings.tokens * float(pool.lengths_N.sum(dtype=np.int64)) - seen.seen_tokens

    def made(self, count: int) -> Covered:
        """Sample, predict, verify; compute the rest where the estimate is too low."""
        pool, settings = self.pool, self.settings
        blind_N = np.logical_not(np.isfinite(self.seen_NJ).all(axis=1))  # nothing to predict these from: computed
        rows = np.union1d(self._stratified(np.flatnonzero(~blind_N), count), np.flatnonzero(blind_N))
        column_nJ = self._compute("sample", rows).columns().astype(np.float64)
        used = np.isfinite(column_nJ).all(axis=1) & ~blind_N[rows]
        predicted_NJ, found = self._predicted(rows[used], column_nJ[used])
        rest_N = ~self.known_N
        self.score_N[rest_N] = pool.combined(predicted_NJ[rest_N].astype(np.float32))
        facts: dict[str, Any] = {"sampled": len(rows), "cross_validated_spearman": found, "verify_rounds": 0}
        facts["swapped_out"] = self._verify(facts) if found is not None else 0
        share = float(self.known_N.mean())
        estimate = None if found is None else round(share + (1 - share) * found, 4)
        facts["estimated_spearman"] = estimate
        facts["fallback"] = estimate is None or estimate < settings.least
        if facts["fallback"]:
            said = "cannot be estimated" if estimate is None else f"is estimated at {estimate:.3f}"
            pool.notice(
                f"proxy_verify: the rank correlation with full scoring {said}, and {settings.least:g} is asked for; "
                "every row is computed"
            )
            self._compute("rest", np.flatnonzero(~self.known_N))
        facts["predicted"] = int((~self.known_N).sum())
        return Covered(self.score_N, predicted_NJ.astype(np.float32), facts=facts)

    def _stratified(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Return one row drawn from each of `count` strata of equal size along the glance's scores."""
        score_n = self.pool.combined(self.seen_NJ[rows].astype(np.float32))
        order, rng = rows[np.argsort(score_n, kind="stable")], self.pool.rng("proxy_verify", "sample")
        return np.array([rng.choice(part) for part in np.array_split(order, min(count, len(order)))], dtype=np.int64)

    def _compute(self, name: str, rows: np.ndarray) -> ScorePass:
        made = self.pool.score(name, rows)
        self.score_N[rows] = made.score()
        self.known_N[rows] = True
        self.left -= float(self.pool.lengths_N[rows].sum(dtype=np.int64))
        return made

    def _predicted(self, rows: np.ndarray, column_nJ: np.ndarray) -> tuple[np.ndarray, float | None]:
        """Return predicted_NJ by the better set of predictors, and its cross-validated rank correlation."""
        if len(rows) < LEAST_SAMPLE:
            return np.full(self.seen_NJ.shape, np.nan), None
        scale_J = np.median(np.abs(column_nJ), axis=0)
        scale_J = np.where(scale_J > 0, scale_J, 1.0)
        wanted_nJ, seen_NJ = np.arcsinh(column_nJ / scale_J), np.arcsinh(self.seen_NJ / scale_J)
        stored = [seen_NJ, self.plain_NK]
        if self.before_NJ.shape == self.seen_NJ.shape:  # else the target groups are others than then
            stored.append(np.arcsinh(self.before_NJ / scale_J))
        best: tuple[float, np.ndarray, np.ndarray] | None = None
        for given_NK in (seen_NJ, _filled(np.concatenate(stored, axis=1))):
            out_nJ = cross_validated(given_NK[rows], wanted_nJ, FOLDS, self.pool.rng("proxy_verify", "folds"))
            error = float(((out_nJ - wanted_nJ) ** 2).mean())
            if best is None or error < best[0]:
                best = error, out_nJ, given_NK
        assert best is not None
        _, out_nJ, given_NK = best
        found = spearman(self._combined(out_nJ, scale_J), self._combined(wanted_nJ, scale_J))
        predicted_NJ = fit(given_NK[rows], wanted_nJ).predict(given_NK)
        return _unscaled(predicted_NJ, scale_J), None if found is None else round(found, 4)

    def _combined(self, value_nJ: np.ndarray, scale_J: np.ndarray) -> np.ndarray:
        return self.pool.combined(_unscaled(value_nJ, scale_J).astype(np.float32))

    def _verify(self, facts: dict[str, Any]) -> int:
        """Compute rows among the best until all of those are; return how many predictions were swapped out."""
        wanted = math.ceil(self.settings.verify * len(self.pool))
        first = self._best(wanted)
        while True:
            best = self._best(wanted)
            unknown = best[~self.known_N[best]]
            spent = np.cumsum(self.pool.lengths_N[unknown], dtype=np.int64)
            rows = unknown[spent <= self.left]
            facts["unverified_of_the_best"] = len(unknown)
            if not len(rows):
                return len(np.setdiff1d(first, best))
            facts["verify_rounds"] += 1
            self._compute(f"verify-{facts['verify_rounds']}", np.sort(rows))

    def _best(self, count: int) -> np.ndarray:
        """Return the rows that would be selected, best first."""
        final_N = self.pool.method.finish(self.score_N).astype(np.float64)
        here = np.flatnonzero(np.isfinite(final_N))
        return here[np.argsort(-final_N[here], kind="stable")][:count]


def _unscaled(value_NJ: np.ndarray, scale_J: np.ndarray) -> np.ndarray:
    """Undo asinh(score / scale); what lies far outside all that was seen stays within float32."""
    return np.sinh(np.clip(value_NJ, -40, 40)) * scale_J


def _filled(value_NK: np.ndarray) -> np.ndarray:
    """Return columns with what is missing at their mean (0 where all is), and a column that says where."""
    missing_NK = ~np.isfinite(value_NK)
    counts_K = np.maximum((~missing_NK).sum(axis=0), 1)
    mean_K = np.where(missing_NK, 0.0, value_NK).sum(axis=0) / counts_K
    filled_NK = np.where(missing_NK, mean_K, value_NK)
    return np.concatenate([filled_NK, missing_NK.any(axis=1, keepdims=True)], axis=1)
