"""Difficulty: how many rows of each question, or how hard the rows are, given how much is trained on.

The score is a difficulty: a row's fail rate under a sampler, its loss, its EL2N. `form: window` takes the rows nearest
to one percentile of difficulty, easy for a small budget and hard for a large one: the centre goes from `easy` at 2 % of
the pool's tokens to `hard` at 50 %, evenly in the budget's logarithm, and stays beyond. That is what CADS (arXiv
2510.16806) found by learning the weights; verify it by a trial of several fixed `centre`. Where a coverage computed
some rows, quantiles are of those, and the others follow. `form: proportional` (DART's Prop2Diff, Tong et al. 2024)
gives each source (the rows of one question) rows in proportion to its mean fail rate, and `form: uniform` equally many;
they are drawn at random, and what a source lacks goes to the others.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from data_contracts.errors import InputError
from stages.coreset.turns import in_turns
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice, Selector
from stages.select.sources import coded

FIRST_BUDGET, LAST_BUDGET = 0.02, 0.5
"""Shares of the pool's tokens between which the centre moves (DATA_METHODS.md, section 13)."""


class Difficulty(Selector):
    """A window of difficulty that moves with the budget, or quotas of questions by their fail rates."""

    reads = frozenset({"scores"})

    form: Literal["window", "proportional", "uniform"] = Field("window", description="What difficulty decides.")
    easy: float = Field(0.3, ge=0, le=1, description="Of `window`: its centre at a small budget, a quantile.")
    hard: float = Field(0.6, ge=0, le=1, description="Of `window`: its centre at a large budget, a quantile.")
    centre: float | None = Field(None, ge=0, le=1, description="Of `window`: its centre whatever the budget.")

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows nearest to the centre first, or the sources in turns by their quotas."""
        rows = pool.usable(self.reads)
        return self._window(pool, quota, rows) if self.form == "window" else self._quotas(pool, quota, rows, rng)

    def _window(self, pool: Candidates, quota: Quota, rows: np.ndarray) -> Choice:
        assert pool.score_N is not None
        centre = centre_of(budget_share(quota, pool), self.easy, self.hard) if self.centre is None else self.centre
        computed_B = np.ones(len(rows), dtype=bool) if pool.exact_N is None else pool.exact_N[rows]
        order = np.concatenate([_nearest(pool.score_N, rows[part], centre) for part in (computed_B, ~computed_B)])
        whose = "the pool's" if computed_B.all() else "those that were computed"
        chosen = quota.fill(order, pool.lengths_N)
        return Choice(chosen, reason=f"difficulty {{score}}, near the {centre:.0%} quantile of {whose}")

    def _quotas(self, pool: Candidates, quota: Quota, rows: np.ndarray, rng: np.random.Generator) -> Choice:
        assert pool.score_N is not None
        rows = rng.permutation(rows)
        source_B, names = coded(pool.sources, rows)
        fail_G = None
        if self.form == "proportional":
            score_B = pool.score_N[rows].astype(np.float64)
            if score_B.min() < 0:
                raise InputError(
                    "difficulties of at least 0", f"one is {score_B.min():.6g}", "give fail rates or losses"
                )
            size_G = np.bincount(source_B, minlength=len(names))
            fail_G = np.bincount(source_B, weights=score_B, minlength=len(names)) / np.maximum(size_G, 1)
        order = in_turns(source_B, fail_G)
        chosen = quota.fill(rows[order], pool.lengths_N)
        why = "equally many" if fail_G is None else "by its mean difficulty"
        return Choice(
            chosen,
            reason=f"drawn from {{group}}, which gives rows {why}; its own difficulty is {{score}}",
            group=source_B[order[: len(chosen)]],
            groups=names,
        )


def _nearest(score_N: np.ndarray, rows: np.ndarray, centre: float) -> np.ndarray:
    """Return `rows` by how near they are to the quantile `centre` of their own scores."""
    ascending = np.argsort(score_N[rows], kind="stable")
    away_B = np.abs((np.arange(len(rows)) + 0.5) / max(1, len(rows)) - centre)
    found: np.ndarray = rows[ascending[np.argsort(away_B, kind="stable")]]
    return found


def budget_share(quota: Quota, pool: Candidates) -> float:
    """Return the budget over the pool, in tokens where the budget is, else in rows; at most 1."""
    if quota.rows is not None:
        return min(quota.rows / len(pool), 1.0)
    assert quota.tokens is not None
    return 1.0 if pool.lengths_N is None else min(quota.tokens / int(pool.lengths_N.sum(dtype=np.int64)), 1.0)


def centre_of(share: float, easy: float, hard: float) -> float:
    """Return the quantile of difficulty at the middle of the window, for a budget of that share of the pool."""
    moved = np.log(share / FIRST_BUDGET) / np.log(LAST_BUDGET / FIRST_BUDGET)
    return float(easy + (hard - easy) * np.clip(moved, 0.0, 1.0))
