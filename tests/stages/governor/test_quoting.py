"""Quotes against closed forms and simulation: what a law reaches, where the rest brings nothing, and what words tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from data_contracts.cost import Budget, Price
from data_contracts.records import Likeness
from stages.governor.quoting import DOUBT, KEPT, Law, by_probes, by_words, modelled_limit
from tests.flows.test_race import plan_of

LAWS = st.builds(
    Law,
    probe_loss=st.floats(0.1, 10),
    probe_se=st.floats(0, 1),
    seen=st.floats(1, 1e6),
    slope=st.floats(-1, 2),
    slope_se=st.floats(0, 1),
)


@pytest.mark.parametrize(("se", "slope_se"), [(0.0, 0.0), (0.05, 0.02), (0.3, 0.01), (0.02, 0.2)])
def test_the_interval_holds_eighty_in_a_hundred_of_a_simulated_law(se, slope_se):
    law = Law(probe_loss=3.0, probe_se=se, seen=100.0, slope=0.2, slope_se=slope_se)
    rng, draws = np.random.default_rng(0), 10**6
    kept = KEPT * np.exp(DOUBT * rng.normal(size=draws)) * 0.2 + KEPT * slope_se * rng.normal(size=draws)
    losses = 3.0 + se * rng.normal(size=draws) - kept * math.log(1000 / 100)
    found = law.loss(1000.0)
    drawn = np.quantile(losses, [0.1, 0.5, 0.9])
    assert (found.low, found.expected, found.high) == pytest.approx(tuple(drawn), abs=0.01)
    assert np.mean((found.low <= losses) & (losses <= found.high)) == pytest.approx(0.8, abs=0.01)


def test_from_where_the_rest_brings_less_than_asked_the_law_says_just_that():
    law = Law(probe_loss=3.0, probe_se=0.0, seen=10.0, slope=0.2, slope_se=0.0)
    enough = law.enough(1000.0, 0.01)
    assert law.loss(enough.expected).expected - law.loss(1000.0).expected == pytest.approx(0.01)
    assert law.enough(1000.0, 0.0).expected == 1000.0
    flat = Law(probe_loss=3.0, probe_se=0.0, seen=10.0, slope=-0.1, slope_se=0.0)
    assert flat.enough(1000.0, 0.01).high == 10.0  # nothing more comes: the probe was enough


@given(LAWS, st.floats(1, 1e9), st.floats(0, 1))
def test_every_interval_is_ordered_and_more_training_never_promises_a_higher_loss(law, flops, least):
    near, far, enough = law.loss(flops), law.loss(2 * flops), law.enough(flops, least)
    assert near.low <= near.expected <= near.high
    assert far.expected <= near.expected + 1e-9
    assert 0 < enough.low <= enough.expected <= enough.high <= flops


@given(st.floats(0, 1), st.integers(1, 10**5))
def test_a_probability_stays_one_whatever_the_resamples_say(share, resamples):
    found = by_probes(share, resamples)
    assert 0 <= found.low <= found.expected <= found.high <= 1


def test_a_race_that_is_even_may_be_decided_either_way_and_a_clear_one_may_not():
    stands = 25.5 / 31  # Jeffreys' mean of 25 in 30
    even = by_probes(0.5, 2000)
    assert even.expected == pytest.approx(0.5)
    assert (even.low, even.high) == pytest.approx((0.9 - 0.8 * stands, 0.1 + 0.8 * stands))  # of 0.1 and 0.9
    assert by_probes(1.0, 2000).high == pytest.approx(stands, abs=1e-3)
    assert by_probes(0.9, 2000).expected == pytest.approx(0.9 * stands + 0.1 * (1 - stands))


LIKENESSES = st.tuples(st.floats(-1, 1), st.floats(0, 0.5), st.floats(0, 0.5)).map(
    lambda item: Likeness(
        chosen=0.5, pool=0.5, moved=item[0], low=max(-1, item[0] - item[1]), high=min(1, item[0] + item[2]),
        reference_rows=24,
    )
)  # fmt: skip


@given(LIKENESSES)
def test_words_give_a_probability_between_what_was_seen_of_either_kind(likeness):
    found = by_words(likeness)
    assert 0 <= found.low <= found.expected <= found.high <= 1
    assert 8.5 / 19 - 1e-12 <= found.expected <= 27.5 / 37 + 1e-12


def test_words_that_are_sure_give_what_was_seen_of_such_choices():
    def like(moved, low, high):
        return by_words(Likeness(chosen=1, pool=0, moved=moved, low=low, high=high, reference_rows=24))

    seen = like(0.8, 0.75, 0.85)
    planted = stats.beta(27.5, 9.5)
    assert seen.expected == pytest.approx(27.5 / 37, abs=1e-9)
    assert (seen.low, seen.high) == pytest.approx((planted.ppf(0.1), planted.ppf(0.9)), abs=1e-9)
    assert like(0.0, -0.02, 0.02).expected == pytest.approx(8.5 / 19, abs=1e-9)
    assert like(0.2, 0.1, 0.3).expected == pytest.approx((27.5 / 37 + 8.5 / 19) / 2)  # as likely above as below 0.2


def test_the_limit_is_the_scarcest_stock_as_the_plan_models_it():
    plan = plan_of(1000).model_copy(update={"flops_per_token": 10, "tokens_per_second": 2.0})
    assert modelled_limit(Budget(flops=5000), None, plan, 0.05) == pytest.approx(4750)
    assert modelled_limit(Budget(flops=5000, tokens=100, seconds=10), None, plan, 0.0) == 200.0
    assert modelled_limit(Budget(peak_bytes=1), None, plan, 0.05) == 1000.0  # one pass over the pool


def test_money_is_worth_the_seconds_of_training_that_its_price_gives():
    plan = plan_of(1000).model_copy(update={"flops_per_token": 10, "tokens_per_second": 2.0})
    price = Price(hour=3600, stages={"train": 7200, "ingest": 1})  # two a second of training
    assert modelled_limit(Budget(money=8), price, plan, 0.0) == pytest.approx(4 * 20)
    assert modelled_limit(Budget(money=8, seconds=3), price, plan, 0.0) == pytest.approx(3 * 20)
    free = Price(hour=3600, stages={"train": 0})
    assert modelled_limit(Budget(money=8), free, plan, 0.0) == 1000.0  # limits no training
