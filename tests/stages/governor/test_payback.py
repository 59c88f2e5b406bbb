"""Payback against closed forms: planted laws, root-finding, and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from stages.governor.payback import Probe, break_even, budget_fraction, fit_slope, forecasts, has_core, pick, worth

FLOPS_P = np.array([25.0, 50.0, 75.0, 100.0])
TOKENS_D = np.array([10.0, 30.0, 20.0, 40.0])


def planted(name, end, slope, price=0, spread=0.0, seed=0):
    """Return a probe on the law: loss `end` at 100 FLOPs, documents around it."""
    loss_P = end - slope * np.log(FLOPS_P / FLOPS_P[-1])
    noise_D = np.random.default_rng(seed).normal(size=len(TOKENS_D)) * spread
    noise_D -= (noise_D * TOKENS_D).sum() / TOKENS_D.sum()
    return Probe(name, FLOPS_P, loss_P, TOKENS_D * (end + noise_D), price)


def test_the_slope_is_that_of_a_fit_with_an_intercept_a_curve_and_its_error_that_of_ordinary_least_squares():
    rng = np.random.default_rng(3)
    curves = [(FLOPS_P, 4 - 0.3 * np.log(FLOPS_P) + rng.normal(size=4) * 0.01), (FLOPS_P[:3], rng.normal(size=3))]
    x = np.concatenate([np.log(flops) for flops, _ in curves])
    design = np.stack([-x, np.r_[np.ones(4), np.zeros(3)], np.r_[np.zeros(4), np.ones(3)]], axis=1)
    y = np.concatenate([loss for _, loss in curves])
    solved, rss, *_ = np.linalg.lstsq(design, y)
    covariance = rss[0] / (7 - 3) * np.linalg.inv(design.T @ design)
    slope, error = fit_slope(curves)
    assert slope == pytest.approx(solved[0], rel=1e-9)
    assert error == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-9)


def test_a_planted_law_is_continued_to_the_end_of_the_budget_and_the_price_is_training_done_without():
    probes = [planted("random", 3.0, 0.2), planted("dear", 2.9, 0.2, price=400)]
    random, dear = forecasts(TOKENS_D, probes, 1000, np.random.default_rng(0))
    assert random.loss == pytest.approx(3.0 - 0.2 * math.log(1100 / 100), rel=1e-9)
    assert dear.loss == pytest.approx(2.9 - 0.2 * math.log(700 / 100), rel=1e-9)
    assert (random.training_flops, dear.training_flops) == (1100, 700)
    assert dear.gain == pytest.approx(0.1 - 0.2 * math.log(1100 / 700))
    assert dear.probability == 1.0
    assert pick((random, dear), 0.8) is dear


@given(price=st.integers(1, 999), gained=st.floats(1e-3, 1.0), slope=st.floats(1e-2, 2.0))
def test_after_the_break_even_uses_both_arms_reach_the_same_loss_for_the_same_flops(price, gained, slope):
    def loss(flops, end):
        return end - slope * math.log(flops / 100)

    level = loss(1100.0, 3.0)  # what the first arm reaches with 1,100 FLOPs
    needed = brentq(lambda flops: loss(flops, 3.0 - gained) - level, 1e-300, 1100.0, rtol=1e-12)
    uses = break_even(gained, slope, 1100.0, price)
    assert uses == pytest.approx(price / (1100.0 - needed), rel=1e-6)


def test_what_never_gains_never_pays_and_what_is_free_pays_at_once():
    assert break_even(-0.1, 0.2, 1000.0, 10) is None
    assert break_even(0.0, 0.2, 1000.0, 10) is None
    assert break_even(-0.1, 0.2, 1000.0, 0) == 0.0
    assert break_even(0.1, 0.0, 1000.0, 10) == 0.01  # nothing more is gained by training: all of it is saved


def test_an_arm_that_is_as_good_but_dear_is_not_picked():
    arms = forecasts(
        TOKENS_D, [planted("random", 3.0, 0.2), planted("dear", 3.0, 0.2, 500)], 1000, np.random.default_rng(0)
    )
    assert pick(arms, 0.8) is arms[0]
    assert arms[1].gain < 0
    assert arms[1].probability == 0.0


def test_doubt_about_the_documents_leaves_chance_in_place_until_the_gain_is_beyond_it():
    rng = np.random.default_rng(0)
    small = forecasts(TOKENS_D, [planted("random", 3, 0.1), planted("other", 2.99, 0.1, 0, 0.5, 1)], 1000, rng)
    assert 0.2 < small[1].probability < 0.8
    assert pick(small, 0.8).name == "random"
    large = forecasts(TOKENS_D, [planted("random", 3, 0.1), planted("other", 2.0, 0.1, 0, 0.5, 1)], 1000, rng)
    assert pick(large, 0.8).name == "other"


def test_a_shift_that_all_arms_share_does_not_hide_a_difference():
    common = np.random.default_rng(5).normal(size=len(TOKENS_D)) * 3
    probes = [
        Probe(name, FLOPS_P, np.full(4, end), TOKENS_D * (end + common), 0)
        for name, end in (("random", 9.0), ("b", 8.9))
    ]
    arms = forecasts(TOKENS_D, probes, 1000, np.random.default_rng(0))
    assert arms[1].probability == 1.0


def test_a_rising_loss_promises_nothing_of_training_longer():
    rising = Probe("random", FLOPS_P, np.array([3.0, 3.1, 3.2, 3.3]), TOKENS_D * 3.3, 0)
    (arm,) = forecasts(TOKENS_D, [rising], 10**6, np.random.default_rng(0))
    assert arm.loss == pytest.approx(3.3)


def test_what_a_choice_must_be_worth_follows_from_its_price_alone():
    assert worth(0, 1000) == 1.0
    assert worth(500, 1000) == 2.0
    assert worth(500, 1000, uses=10) == pytest.approx(1000 / 950)
    assert worth(1000, 1000) is None


def test_the_share_of_the_pool_is_what_the_budget_visits_so_often():
    assert budget_fraction(200, 100, 4, 0.3) == 0.5  # there is no room for others beside the kind
    assert budget_fraction(10_000, 100, 4, 0.3) == 1.0


@pytest.mark.parametrize(
    ("passes", "share", "core"),
    [
        (0.02, 0.02, False),
        (0.1, 0.1, False),
        (0.25, 0.1, False),
        (0.4, 0.1, False),
        (0.8, 0.8, True),
        (3.0, 1.0, True),
    ],
)
def test_a_budget_sees_each_row_once_then_repeats_the_kind_and_then_has_room_for_others(passes, share, core):
    assert budget_fraction(1000 * passes, 1000, 4) == pytest.approx(share)
    assert has_core(budget_fraction(1000 * passes, 1000, 4), 4, 0.1) == core
    assert not has_core(budget_fraction(1000 * passes, 1000, 1), 1, 0.1)
    assert budget_fraction(1000 * passes, 1000, 1) == pytest.approx(min(1, passes))  # chance: fresh rows
