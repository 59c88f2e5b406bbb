"""Budgets of groups: against the published loop, against brute force, and as prefixes of one another."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.coreset.turns import in_turns

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def grouped(sizes: list[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


@given(SIZES, st.integers(0, 100))
def test_equal_turns_are_the_budgets_of_smallest_first(sizes: list[int], seed: int) -> None:
    group = grouped(sizes, seed)
    order = in_turns(group)
    assert sorted(order.tolist()) == list(range(len(group)))
    ascending = sorted(range(len(sizes)), key=lambda group: (sizes[group], -group))
    for total in range(len(group) + 1):
        budget, left = {}, total
        for place, name in enumerate(ascending):  # S2L, and CCS: each an equal part of what is left
            budget[name] = min(sizes[name], left // (len(sizes) - place))
            left -= budget[name]
        assert np.bincount(group[order[:total]], minlength=len(sizes)).tolist() == [
            budget[name] for name in range(len(sizes))
        ]


@given(SIZES, st.integers(0, 100))
def test_rows_of_a_group_keep_their_order(sizes: list[int], seed: int) -> None:
    group = grouped(sizes, seed)
    order = in_turns(group, np.arange(len(sizes)) + 0.5)
    for name in range(len(sizes)):
        mine = order[group[order] == name]
        assert (np.diff(mine) > 0).all()


@given(st.lists(st.floats(0.1, 5), min_size=2, max_size=4), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_turns_by_weight_round_to_the_nearest_shares(weights: list[float], total: int) -> None:
    groups, weight = len(weights), np.array(weights)
    got = np.bincount(grouped([8] * groups, 0)[in_turns(grouped([8] * groups, 0), weight)[:total]], minlength=groups)

    def unfairness(counts: np.ndarray) -> float:  # what Sainte-Laguë's division makes least
        return float((np.square(counts - total * weight / weight.sum()) / weight).sum())

    every = [np.array(counts) for counts in product(range(total + 1), repeat=groups) if sum(counts) == total]
    assert unfairness(got) <= min(unfairness(counts) for counts in every) + 1e-9


def test_what_a_full_group_cannot_use_goes_to_the_others_and_nothing_to_weight_zero_before_the_end() -> None:
    group = np.array([0] * 2 + [1] * 10 + [2] * 10 + [3] * 3)
    order = in_turns(group, np.array([10.0, 1.0, 2.0, 0.0]))
    assert np.bincount(group[order[:14]], minlength=4).tolist() == [2, 4, 8, 0]
    assert group[order[-3:]].tolist() == [3, 3, 3]
