"""Costs add, peaks do not; a budget is never overdrawn below zero and names what runs out first."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data_contracts.cost import STOCKS, Budget, Cost

# Seconds and money are multiples of 1/8 so that float addition is exact and the laws can be tested as laws.
EXACT = st.integers(0, 10**9).map(lambda n: n / 8)
COSTS = st.builds(
    Cost,
    flops=st.integers(0, 10**18),
    tokens=st.integers(0, 10**9),
    seconds=EXACT,
    money=EXACT,
    peak_bytes=st.integers(0, 10**12),
    joules=EXACT,
)
MAYBE = st.none() | EXACT
BUDGETS = st.builds(
    Budget,
    flops=st.none() | st.integers(0, 10**18),
    tokens=st.none() | st.integers(0, 10**9),
    seconds=MAYBE,
    money=MAYBE,
    peak_bytes=st.none() | st.integers(0, 10**12),
)


@given(st.lists(COSTS, max_size=5))
def test_the_sum_of_costs_is_the_sum_of_stocks_and_the_largest_peak_in_any_order(costs: list[Cost]) -> None:
    total = functools.reduce(Cost.__add__, costs, Cost())
    for stock in STOCKS:
        assert getattr(total, stock) == sum(getattr(cost, stock) for cost in costs)
    assert total.joules == sum(cost.joules for cost in costs)
    assert total.peak_bytes == max((cost.peak_bytes for cost in costs), default=0)
    assert functools.reduce(Cost.__add__, reversed(costs), Cost()) == total


@given(BUDGETS, COSTS, COSTS)
def test_spending_in_two_steps_or_one_leaves_the_same(budget: Budget, a: Cost, b: Cost) -> None:
    assert budget.minus(a).minus(b) == budget.minus(a + b)
    assert budget.minus(a).peak_bytes == budget.peak_bytes


@given(BUDGETS, COSTS)
def test_what_binds_is_the_smallest_ratio_of_what_there_is_to_what_is_needed(budget: Budget, need: Cost) -> None:
    ratios = {
        name: Fraction(getattr(budget, name)) / Fraction(getattr(need, name))
        for name in (*STOCKS, "peak_bytes")
        if getattr(budget, name) is not None and getattr(need, name) > 0
    }
    binding = budget.binding(need)
    if not ratios:
        assert binding is None
        assert budget.affords(need)
        return
    assert binding is not None
    assert math.isclose(binding[1], float(min(ratios.values())), rel_tol=1e-12)
    assert math.isclose(float(ratios[binding[0]]), binding[1], rel_tol=1e-12)
    if abs(float(min(ratios.values())) - 1) > 1e-9:
        assert budget.affords(need) == (min(ratios.values()) >= 1)


@given(BUDGETS, COSTS)
def test_what_is_afforded_can_be_paid_in_full(budget: Budget, need: Cost) -> None:
    if budget.affords(need):
        left = budget.minus(need)
        for stock in STOCKS:
            if getattr(budget, stock) is not None:
                assert math.isclose(getattr(left, stock) + getattr(need, stock), getattr(budget, stock), rel_tol=1e-12)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "many"])
@pytest.mark.parametrize("kind", [Cost, Budget])
def test_a_cost_or_budget_that_is_no_amount_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(ValidationError):
        kind(seconds=value)
