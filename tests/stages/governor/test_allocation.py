"""Allocation against the specification's numbers, a general optimizer, and the conditions of optimality."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar

from data_contracts.errors import InputError
from stages.governor.allocation import cheapest, marginal, share

A, B = [2.0, 1.0, 3.0], [0.3, 0.5, 0.2]


@pytest.mark.parametrize(("a", "b", "price"), [(2, 0.3, 1e-4), (1, 0.5, 1e-3), (400, 0.05, 1e-2)])
def test_one_run_stops_where_a_search_finds_loss_and_price_lowest(a, b, price):
    found = minimize_scalar(
        lambda x: a * np.exp(-b * x) + price * np.exp(x), bounds=(-5, 30), method="bounded", options={"xatol": 1e-10}
    )
    assert cheapest(a, b, price) == pytest.approx(np.exp(found.x), rel=1e-5)
    assert marginal(a, b, cheapest(a, b, price)) == pytest.approx(price)


def test_three_runs_share_as_worked_out_in_the_specification():
    shares = share(A, B, 1e4)
    assert shares.flops_R == pytest.approx([3071.1, 932.3, 5996.6], abs=0.05)
    for a, b, flops in zip(A, B, shares.flops_R, strict=True):
        assert marginal(a, b, flops) == pytest.approx(shares.price, rel=1e-9)


def total(x, a, b, spent):
    return float((np.asarray(a) * (np.asarray(spent) + x) ** -np.asarray(b)).sum())


@pytest.mark.parametrize(
    ("spent", "most"),
    [([0, 0, 0], [np.inf] * 3), ([10, 10, 90_000], [np.inf] * 3), ([5, 500, 5], [1000, np.inf, 4000])],
)
def test_a_general_optimizer_finds_no_lower_sum_of_losses_and_the_same_shares(spent, most):
    ours = share(A, B, 1e4, spent_R=spent, most_R=most)
    found = minimize(
        lambda x: total(x * 1e4, A, B, spent),
        np.full(3, 1 / 3),
        bounds=[(1e-9, min(1.0, top / 1e4)) for top in most],
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    theirs = total(found.x * 1e4, A, B, spent)
    assert theirs == pytest.approx(total(ours.flops_R, A, B, spent), rel=1e-5)
    assert ours.flops_R.sum() == pytest.approx(1e4, rel=1e-12)
    assert total(ours.flops_R, A, B, spent) <= theirs + 1e-9
    assert ours.flops_R == pytest.approx(found.x * 1e4, abs=30)


runs = st.lists(
    st.tuples(st.floats(0.01, 1e4), st.floats(0.02, 1.5), st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=6
)


@given(runs, st.floats(1, 1e6))
@settings(max_examples=60)
def test_who_takes_something_has_the_price_and_who_takes_nothing_would_gain_less(given_runs, budget):
    a, b, spent, most = map(np.array, zip(*given_runs, strict=True))
    shares = share(a, b, budget, spent_R=spent, most_R=most)
    assert (shares.flops_R >= 0).all()
    assert (shares.flops_R <= most * (1 + 1e-9)).all()
    assert shares.flops_R.sum() == pytest.approx(min(budget, most.sum()), rel=1e-9)
    if shares.price == 0:
        return
    for one in range(len(a)):
        gain = marginal(a[one], b[one], spent[one] + shares.flops_R[one])
        if shares.flops_R[one] < most[one] * (1 - 1e-6):  # could take more: it is not worth more than the price
            assert gain <= shares.price * (1 + 1e-6)
        if shares.flops_R[one] > 1e-6 * budget:  # takes something: it is worth the price
            assert gain >= shares.price * (1 - 1e-6)


def test_a_run_far_along_takes_nothing_and_runs_at_their_most_leave_a_rest():
    assert share([1, 1], [0.5, 0.5], 10, spent_R=[1, 1000]).flops_R.tolist() == [10.0, 0.0]
    rest = share([1, 1], [0.5, 0.5], 10, most_R=[2, 3])
    assert (rest.flops_R.tolist(), rest.price) == ([2.0, 3.0], 0.0)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(InputError, match="above 0"):
        share([1, -1], [0.5, 0.5], 10)
    with pytest.raises(InputError, match="a run"):
        share([1, 1], [0.5], 10)
