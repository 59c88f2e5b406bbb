"""Top-k: the rows with the highest scores, over all target groups together, group by group, or above a threshold.

`over: score` ranks by the score. `over: max` ranks by the highest of a row's group scores (LESS, Xia et al. 2024).
`over: round_robin` lets the target groups take turns: each takes the row that is best for it among those not yet taken,
so that no group goes without (at small budgets the better form of LESS in arXiv 2602.14696).
`over: threshold` takes the best, but none that scores below `least`, or below the `quantile` of the scores. Ties go to
the smaller example id, so the choice is a function of the scores alone. Keeps eight bytes a row for the order; over
turns, eight bytes a chosen row and group.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from data_contracts.errors import ConfigError
from stages.select.coreset import wanted
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice, Selector


class TopK(Selector):
    """The best by score; rows without a valid score are never chosen."""

    reads = frozenset({"scores"})
    supported = True

    over: Literal["score", "round_robin", "max", "threshold"] = Field(
        "score", description="What is ranked by; `round_robin` and `max` read a score for each target group."
    )
    least: float | None = Field(None, allow_inf_nan=False, description="Of `threshold`: the lowest score taken.")
    quantile: float | None = Field(
        None, ge=0, lt=1, description="Of `threshold`, in place of `least`: that quantile of the valid scores."
    )

    @model_validator(mode="after")
    def _one_threshold(self) -> TopK:
        given = (self.least is not None) + (self.quantile is not None)
        if given != (self.over == "threshold"):
            raise ValueError("`over: threshold` has one of `least` and `quantile`; the other forms have neither")
        return self

    def needs(self) -> frozenset[str]:
        """Return `groups` where groups are ranked by."""
        return frozenset({"groups"}) if self.over in ("round_robin", "max") else self.reads

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the rows best first; `gain` is the score that the row was taken for."""
        assert pool.score_N is not None
        rows = pool.usable(self.needs())
        if self.over == "round_robin":
            return self._in_turns(pool, quota, rows)
        if self.over == "max":
            assert pool.column_NJ is not None
            group_B = pool.column_NJ[rows].argmax(axis=1)
            best_B = pool.column_NJ[rows, group_B]
            order = np.argsort(-best_B, kind="stable")
            chosen = quota.fill(rows[order], pool.lengths_N)
            order = order[: len(chosen)]
            reason = "{gain} for group {group}, the highest of its group scores; rank {rank}"
            return Choice(chosen, best_B[order], reason=reason, group=group_B[order], groups=pool.group_names)
        order = rows[np.argsort(-pool.score_N[rows], kind="stable")]
        short, reason = "", "score {score}, rank {rank} of the pool"
        if self.over == "threshold":
            least = self._least(pool.score_N[rows])
            above = order[pool.score_N[order] >= least]
            if not len(above):
                best = pool.score_N[order[0]]
                raise ConfigError(f"a row scores at least {least:.6g}", f"the best scores {best:.6g}", "lower `least`")
            if len(above) < len(order) and quota.wants_more(quota.fill(above, pool.lengths_N), pool.lengths_N):
                short = f"the others score below {least:.6g}"
            order, reason = above, f"score {{score}}, at least {least:.6g}, rank {{rank}} of the pool"
        chosen = quota.fill(order, pool.lengths_N)
        return Choice(chosen, gain=pool.score_N[chosen], reason=reason, short=short)

    def _least(self, score_B: np.ndarray) -> float:
        if self.least is not None:
            return float(np.float32(self.least))
        assert self.quantile is not None
        return float(np.quantile(score_B, self.quantile, method="higher"))

    def _in_turns(self, pool: Candidates, quota: Quota, rows: np.ndarray) -> Choice:
        assert pool.column_NJ is not None
        column_BJ = pool.column_NJ[rows]
        order, group = round_robin(column_BJ, wanted(quota, pool, rows))
        chosen = quota.fill(rows[order], pool.lengths_N)
        order, group = order[: len(chosen)], group[: len(chosen)]
        reason = "the best left for group {group}, with {gain}; rank {rank}"
        return Choice(chosen, column_BJ[order, group], reason=reason, group=group, groups=pool.group_names)


def round_robin(column_BJ: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, groups): in turn, each group's best row not yet taken; ties go to the smaller row."""
    groups = column_BJ.shape[1]
    # a group looks no farther than `count` rows down: fewer than that can have been taken before it
    orders = [np.argsort(-column_BJ[:, group], kind="stable")[:count].tolist() for group in range(groups)]
    places = [0] * groups
    taken = np.zeros(len(column_BJ), dtype=bool)
    rows = np.empty(min(count, len(column_BJ)), dtype=np.int64)
    for step in range(len(rows)):
        order, group = orders[step % groups], step % groups
        while taken[order[places[group]]]:
            places[group] += 1
        rows[step] = order[places[group]]
        taken[rows[step]] = True
    return rows, np.arange(len(rows)) % groups
