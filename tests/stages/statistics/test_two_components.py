"""The split into two groups, against scikit-learn's mixture and by construction."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.mixture import GaussianMixture

from stages.statistics.two_components import upper_of_two


@pytest.mark.parametrize(("share", "apart", "width"), [(0.1, 6.0, 1.0), (0.3, 4.0, 0.7), (0.5, 5.0, 2.0)])
def test_it_splits_where_scikit_learns_mixture_does(share: float, apart: float, width: float) -> None:
    rng = np.random.default_rng(0)
    upper = rng.random(2000) < share
    value = np.where(upper, rng.normal(apart, width, 2000), rng.normal(0, 1, 2000)) * 7 - 3
    found = upper_of_two(value)
    assert found is not None
    peer = GaussianMixture(2, random_state=0, tol=1e-8, max_iter=1000).fit(value[:, None])
    theirs = peer.predict(value[:, None]) == peer.means_.ravel().argmax()
    inner = (value > peer.means_.min()) & (value < peer.means_.max())  # outside, a wide component wins both tails
    assert (found == theirs)[inner].mean() > 0.998
    assert (found == upper).mean() > 0.95


def test_one_group_is_not_split_and_few_or_equal_numbers_neither() -> None:
    for seed in range(20):
        assert upper_of_two(np.random.default_rng(seed).normal(5, 2, 500)) is None
    assert upper_of_two(np.array([1.0, 2.0, 50.0])) is None
    assert upper_of_two(np.full(100, 3.0)) is None


def test_what_lies_below_the_lower_group_is_never_called_upper() -> None:
    rng = np.random.default_rng(1)
    value = np.concatenate([rng.normal(0, 1, 900), rng.normal(8, 6, 300), [-9.0, -12.0]])
    found = upper_of_two(value)
    assert found is not None
    assert not found[-2:].any()
