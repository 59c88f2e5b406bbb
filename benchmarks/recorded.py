"""Recorded real curves, and what a policy that governs one loses against its hindsight.

A policy sees the validation loss of one segment, evaluation by evaluation, the one before the first step among them,
and may end it; the checkpoint that validation likes best is kept. What is lost is read from the holdout, which no
policy sees: hindsight is the lowest holdout loss of the recording, which is the whole budget. Earlier runs that `asha`
and `median_stop` compare with are the other runs of the same model on the same kind of rows.

Two groups, told by the holdout and the pool alone, were defined before any policy had seen a curve:

    productive      the lowest loss lies in the last tenth of the budget, at least 0.05 nats below the first half's
    over-repeated   rows seen ten times or more, the lowest loss within a fourth of the budget, the last 0.1 above it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.planted import PRICE, Outcome
from benchmarks.real_curves import SIZES, read_curves
from data_contracts.cost import Budget
from stages.governor.policy import INSIDE, Policy
from stages.governor.state import State

GROUPS = ("productive", "over-repeated", "other")


@dataclass(frozen=True)
class Ended:
    """Where a policy ended a recording: the evaluation (0 is the one before the first step), and the one kept."""

    at: int
    kept: int


@dataclass(frozen=True)
class Recorded:
    """One run: its name and its rows (`real_curves.COLUMNS`), oldest first."""

    name: str
    rows: tuple[dict[str, Any], ...]
    every: int = 1
    """A policy sees one evaluation in so many; what is lost is told by all of them."""

    @classmethod
    def all(cls, every: int = 1) -> tuple[Recorded, ...]:
        """Return the recordings kept in the project."""
        return tuple(cls(name, tuple(rows), every) for name, rows in read_curves().items())

    @cached_property
    def seen(self) -> range:
        """The evaluations that a policy sees, the one before the first step and the last among them."""
        return range(0, len(self.rows), self.every)

    @cached_property
    def holdout_loss(self) -> np.ndarray:
        """Holdout loss of each evaluation, nats."""
        return np.array([row["holdout_loss"] for row in self.rows])

    @cached_property
    def spent_share(self) -> np.ndarray:
        """FLOPs at each evaluation as a share of the budget."""
        return np.array([row["flops"] for row in self.rows]) / self.rows[-1]["flops"]

    @property
    def kind(self) -> str:
        """The model and the kind of rows."""
        return self.name.rsplit("/", 3)[0]

    @property
    def group(self) -> str:
        """Which of `GROUPS` it belongs to."""
        best, pool = int(self.holdout_loss.argmin()), int(self.name.split("/")[2])
        first_half = self.holdout_loss[self.spent_share <= 0.5].min()
        if self.spent_share[best] >= 0.9 and first_half - self.holdout_loss[best] >= 0.05:
            return "productive"
        repeated = SIZES["pool"] / pool >= 10
        if repeated and self.spent_share[best] <= 0.25 and self.holdout_loss[-1] - self.holdout_loss[best] >= 0.1:
            return "over-repeated"
        return "other"

    def govern(self, policy: Policy) -> Ended:
        """Let a policy govern the recording."""
        budget, known = self.rows[-1]["flops"], [self.rows[0]]
        for at in self.seen[1:]:
            known.append(self.rows[at])
            left = budget - self.rows[at]["flops"]
            state = State.from_rows([known], horizon=left)
            if left and policy.decide(state, Budget(flops=left), INSIDE).action == "end":
                break
        return Ended(at, self.seen[int(np.argmin([row["validation_loss"] for row in known]))])

    def lost(self, ended: Ended) -> Outcome:
        """Return the regrets of ending there."""
        priced_N = self.holdout_loss + PRICE * self.spent_share
        least, kept = int(priced_N.argmin()), float(self.holdout_loss[ended.kept])
        return Outcome(
            nats=kept - float(self.holdout_loss.min()),
            flops=float(self.spent_share[ended.at] - self.spent_share[least]),
            priced=kept + PRICE * float(self.spent_share[ended.at]) - float(priced_N[least]),
            spent=float(self.spent_share[ended.at]),
        )


def others(curve: Recorded, curves: Iterable[Recorded]) -> tuple[dict[str, Any], ...]:
    """Return the other runs of the same model on the same kind of rows, as `asha` and `median_stop` read them."""
    return tuple(
        {
            "flops": [one.rows[at]["flops"] for at in one.seen],
            "values": [one.rows[at]["validation_loss"] for at in one.seen],
        }
        for one in curves
        if one.kind == curve.kind and one.name != curve.name
    )
