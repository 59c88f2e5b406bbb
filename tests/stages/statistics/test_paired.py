"""Paired comparisons against closed forms, scipy and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from stages.statistics.paired import clustered_se, compare_ratios


def compare(before, after, weight=None, sources=None, **options):
    before, after = np.asarray(before, float), np.asarray(after, float)
    weight = np.ones(len(before)) if weight is None else np.asarray(weight, float)
    sources = np.full(len(before), "one") if sources is None else np.asarray(sources)
    return compare_ratios(before, after, weight, weight, sources, resamples=options.pop("resamples", 999), **options)


def test_normal_differences_give_the_interval_of_the_t_test():
    rng = np.random.default_rng(1)
    before = rng.normal(3, 1, 2000)
    after = before - 0.2 + rng.normal(0, 0.5, 2000)
    found = compare(before, after, resamples=4999)
    expected = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert found.low == pytest.approx(expected.low, abs=0.002)  # bootstrap noise: about 2 % of a half-width of 0.022
    assert found.high == pytest.approx(expected.high, abs=0.002)
    assert found.se == pytest.approx(stats.sem(after - before))
    assert found.difference == pytest.approx(np.mean(after - before))


def test_the_interval_of_a_mean_is_that_of_scipy_on_the_differences():
    rng = np.random.default_rng(2)
    before, after = rng.exponential(1, 40), rng.exponential(2, 40)
    found = compare(before, after, resamples=999, seed=7)
    expected = stats.bootstrap(
        (after - before,), np.mean, n_resamples=999, method="BCa", rng=np.random.default_rng(7)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_a_ratio_of_sums_is_compared_and_not_a_mean_of_ratios():
    found = compare([10.0, 1.0], [5.0, 1.0], weight=[10, 1])
    assert (found.before, found.after) == pytest.approx((11 / 11, 6 / 11))


def test_the_clustered_error_equals_its_definition_by_hand():
    residual = np.array([1.0, 2.0, -1.0, -2.0, 0.5])
    cluster = np.array([0, 0, 1, 1, 2])
    by_hand = math.sqrt(3 / 2 * ((1 + 2) ** 2 + (-1 - 2) ** 2 + 0.5**2)) / 5
    assert clustered_se(residual, cluster, 5.0) == pytest.approx(by_hand)


def test_copies_of_an_item_in_one_source_do_not_narrow_the_interval():
    rng = np.random.default_rng(3)
    before, after = rng.normal(3, 1, 30), rng.normal(2.8, 1, 30)
    names = np.array([f"s{i}" for i in range(30)])
    single = compare(before, after, sources=names)
    copied = compare(np.repeat(before, 5), np.repeat(after, 5), sources=np.repeat(names, 5))
    assert copied.clusters == 30
    assert (copied.low, copied.high) == pytest.approx((single.low, single.high))
    assert copied.se == pytest.approx(single.se)


def test_few_sources_are_not_resampled_as_wholes():
    found = compare(range(20), range(20), sources=["a", "b"] * 10)
    assert found.clusters == 0


def test_equal_models_differ_by_exactly_nothing():
    found = compare([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)


def test_one_item_leaves_the_interval_open():
    found = compare([1.0], [0.0])
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_the_bootstrap_agrees_with_every_resample_of_a_tiny_sample():
    """All 4⁴ resamples, with BCa's two corrections computed by hand."""
    before, after = np.array([3.0, 2.0, 4.0, 1.5]), np.array([2.0, 2.1, 2.5, 1.4])
    weight = np.array([2.0, 3.0, 1.0, 2.0])

    def difference(index):
        return (after[index].sum() - before[index].sum()) / weight[index].sum()

    every = np.array([difference(list(index)) for index in itertools.product(range(4), repeat=4)])
    estimate = difference(list(range(4)))
    below = (np.sum(every < estimate) + np.sum(every <= estimate)) / (2 * len(every))
    bias = stats.norm.ppf(below)
    jack = np.array([difference([j for j in range(4) if j != i]) for i in range(4)])
    centred = jack.mean() - jack
    skew = (centred**3).sum() / (6 * (centred**2).sum() ** 1.5)
    expected = []
    for tail in (0.05, 0.95):
        z = stats.norm.ppf(tail)
        level = stats.norm.cdf(bias + (bias + z) / (1 - skew * (bias + z)))
        expected.append(np.quantile(every, level))
    found = compare(before, after, weight=weight, confidence=0.9, resamples=20000)
    assert (found.low, found.high) == pytest.approx(expected, abs=0.02)


values = st.floats(0, 10)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(values, values, st.integers(1, 20)), min_size=2, max_size=12), st.integers(0, 3))
def test_the_interval_holds_the_difference_and_turns_with_the_models(rows, seed):
    before, after, weight = (np.array(column, float) for column in zip(*rows, strict=True))
    there = compare(before, after, weight, resamples=199, seed=seed)
    back = compare(after, before, weight, resamples=199, seed=seed)
    assert back.difference == pytest.approx(-there.difference, abs=1e-12)
    assert back.se == pytest.approx(there.se, abs=1e-12)
    assert math.isfinite(there.low)
    assert there.low <= there.high
    assert there == compare(before, after, weight, resamples=199, seed=seed)
