"""The benchmark's hindsight: no policy beats it, and its search finds what a brute force finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.planted import PRICE, SHAPES, STEPS, Planted, run
from data_contracts.cost import Budget
from data_contracts.method import resolve
from stages.governor.policy import Choice, Policy
from stages.governor.state import State


class Coin(Policy):
    """Decides by a coin: goes anywhere that a policy can go."""

    seed: int = 0

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        rng = np.random.default_rng([self.seed, len(state.points)])
        going = sorted(allowed & {"continue", "reselect"})
        action = str(rng.choice(going)) if rng.random() < 0.85 else str(rng.choice(sorted(allowed)))
        return Choice(action=action, reason="a coin")


@pytest.mark.parametrize("shape", SHAPES)
def test_no_policy_ends_below_hindsight(shape):
    for seed in range(40):
        planted = Planted.draw(shape, 0.002, (7, seed))
        for policy in (Coin(seed=seed), resolve(Policy, {"method": "patience"}, "p")):
            outcome = run(policy, planted)
            assert outcome.nats >= -1e-12
            assert outcome.priced >= -1e-12


def test_hindsight_of_a_run_with_two_choices_is_that_of_trying_all_lengths():
    """Later drops are nothing, so at most two re-selections can pay: all their lengths are tried."""
    planted = Planted.draw("drop", 0.002, (7, 1))
    planted.drops_K[3:] = 0.0
    best, priced = np.inf, np.inf
    for lengths in itertools.product(range(0, 16), range(1, 20), range(1, 20)):
        for choices in (1, 2, 3):
            spent = sum(lengths[:choices]) + (choices - 1) * planted.cost
            if spent <= STEPS:
                loss = planted.truth_N[0] - sum(planted._gain(k, lengths[k]) for k in range(choices))
                best, priced = min(best, loss), min(priced, loss + PRICE * spent / STEPS)
    lowest, cheapest, _ = planted.hindsight()
    assert lowest == pytest.approx(best, abs=1e-9)
    assert cheapest == pytest.approx(priced, abs=1e-9)
