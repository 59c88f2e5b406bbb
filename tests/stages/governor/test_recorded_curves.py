"""Recorded real runs: what the default policy promises of them, and a hindsight that no policy beats."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.real_curves import CURVES, EVALUATIONS, runs
from benchmarks.recorded import Recorded, others
from data_contracts.config import GovernConfig
from data_contracts.cost import Budget
from data_contracts.method import resolve
from stages.governor.policy import Choice, Policy
from stages.governor.state import State

RECORDED = Recorded.all()
OF = {group: [curve for curve in RECORDED if curve.group == group] for group in ("productive", "over-repeated")}


class EndsAt(Policy):
    """Ends at one evaluation, the first after the start being number 1."""

    number: int = 1

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        return Choice(action="end" if len(state.attempts) > self.number else "continue", reason="")


def default() -> Policy:
    return resolve(Policy, GovernConfig().policy, "govern.policy")


def test_the_table_holds_every_run_whole_and_is_small():
    assert [curve.name for curve in RECORDED] == [run.name for run in runs()]
    assert len(RECORDED) >= 30
    assert CURVES.stat().st_size < 200_000
    for curve in RECORDED:
        assert len(curve.rows) == EVALUATIONS + 1
        assert (np.diff([row["flops"] for row in curve.rows]) > 0).all()
        assert np.isfinite([[row["validation_loss"], row["holdout_loss"]] for row in curve.rows]).all()


def test_over_repeated_data_end_within_35_percent_of_the_budget_at_003_nats_above_the_lowest():
    assert len(OF["over-repeated"]) >= 10
    for curve in OF["over-repeated"]:
        lost = curve.lost(curve.govern(default()))
        assert lost.spent <= 0.35, curve.name
        assert lost.nats <= 0.03, curve.name


def test_a_productive_run_is_not_ended_before_90_percent_of_the_budget():
    assert len(OF["productive"]) >= 10
    for curve in OF["productive"]:
        assert curve.lost(curve.govern(default())).spent >= 0.9, curve.name


@pytest.mark.parametrize("every", [1, 9])
def test_hindsight_is_the_least_loss_and_price_over_all_ends(every):
    for curve in Recorded.all(every)[::7]:
        ends = curve.seen[1:]
        lost = [curve.lost(curve.govern(EndsAt(number=number))) for number in range(1, len(ends) + 1)]
        assert [outcome.spent for outcome in lost] == pytest.approx(curve.spent_share[list(ends)])
        assert min(outcome.priced for outcome in lost) >= -1e-12
        assert min(outcome.nats for outcome in lost) >= -1e-12
        if every == 1:
            validation = np.array([row["validation_loss"] for row in curve.rows])
            kept = [float(curve.holdout_loss[validation[: at + 1].argmin()]) for at in ends]
            priced = np.array(kept) + 0.05 * curve.spent_share[1:]
            assert min(o.priced for o in lost) == pytest.approx(
                priced.min() - (curve.holdout_loss + 0.05 * curve.spent_share).min()
            )


def test_what_a_run_is_compared_with_is_of_the_same_model_and_rows_and_not_itself():
    for curve in RECORDED[::5]:
        found = others(curve, RECORDED)
        assert len(found) == sum(one.kind == curve.kind for one in RECORDED) - 1
        assert [row["validation_loss"] for row in curve.rows] not in [one["values"] for one in found]
