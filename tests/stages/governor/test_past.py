"""Scores of past quotes against values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.quotes import Hours, Offer, Quote, Span
from stages.governor.past import Came, choice, score


def between(low, high):
    return Span(expected=(low + high) / 2, low=low, high=high)


def offer(arm, probability=None, loss=None):
    return Offer(
        arm=arm,
        scorer={"method": "bm25"},
        coverage={"method": "full"},
        selector={"method": "random" if arm == "random" else "top_k"},
        fraction=0.1,
        basis="nothing" if probability is None else "probes",
        probability=None if probability is None else Span(expected=probability, low=0, high=1),
        loss=loss,
        price_flops=0,
        flops=between(90, 110),
    )


def quoted(probability, *, follows="bm25", watts=None):
    offers = (offer("random", loss=between(3.0, 3.2)), offer("bm25", probability, between(2.8, 3.0)))
    quote = Quote(offers=offers, follows=follows, best="bm25", spendable_flops=100, probe_flops=5, warm_up_flops=1)
    seconds = {"random": between(10, 20), "bm25": between(10, 20)}
    return quote, Hours(basis="timed", seconds=seconds, ways={}, seconds_a_flop=between(1, 2), watts=watts)


def test_briers_score_and_the_coverage_are_those_worked_out_by_hand():
    past = [
        (*quoted(0.9), Came(loss=2.9, flops=100, seconds=15, won=True)),  # (0.1)², all three held
        (*quoted(0.6), Came(loss=3.1, flops=111, seconds=15, won=False)),  # (0.6)², one held
        (*quoted(0.5, watts=2.0), Came(loss=None, flops=90, seconds=21, joules=20, won=None)),  # not judged; 2 held
    ]
    found = score(past)
    assert found.brier == pytest.approx((0.01 + 0.36) / 2)
    assert (found.quotes, found.judged) == (3, 2)
    assert (found.held, found.intervals, found.coverage) == (6, 9, pytest.approx(6 / 9))
    assert found.by_number == {"FLOPs": (2, 3), "energy": (1, 1), "loss": (1, 2), "time": (2, 3)}


def test_a_run_that_takes_chance_is_held_against_chances_own_numbers_and_the_choices_probability():
    quote, hours = quoted(0.3, follows="random")
    found = score([(quote, hours, Came(loss=3.1, won=False))])
    assert choice(quote).arm == "bm25"
    assert found.brier == pytest.approx(0.09)
    assert found.by_number == {"loss": (1, 1)}


def test_without_a_quote_or_a_probability_there_is_nothing_to_score():
    nothing = score([])
    assert (nothing.quotes, nothing.brier, nothing.coverage) == (0, None, None)
    quote, hours = quoted(None)
    assert score([(quote, hours, Came(won=True))]).brier is None


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=5))
def test_briers_score_lies_between_nothing_and_one_and_is_least_for_what_happened(told):
    found = score([(*quoted(p), Came(won=won)) for p, won in told])
    perfect = score([(*quoted(float(won)), Came(won=won)) for _, won in told])
    assert perfect.brier == 0 <= found.brier <= 1
