"""Matching pursuit against known mixtures and a projected-gradient oracle."""

from __future__ import annotations

import numpy as np
import pytest

from stages.coreset.matching_pursuit import matching_pursuit


def test_a_mixture_of_few_orthogonal_rows_is_found_exactly() -> None:
    rng = np.random.default_rng(0)
    rows = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    wanted = 3 * rows[4] + 2 * rows[9] + 0.5 * rows[17]
    found, weights, errors = matching_pursuit(rows, wanted, 10)
    assert found.tolist() == [4, 9, 17]
    np.testing.assert_allclose(weights, [3, 2, 0.5])
    assert errors[-1] < 1e-12


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_the_weights_of_the_rows_taken_are_the_best_that_are_not_negative(ridge: float) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(50, 12))
    wanted = rng.normal(size=12)
    found, weights, errors = matching_pursuit(rows, wanted, 8, ridge=ridge, tolerance=0.0)
    taken = rows[found]
    oracle = np.zeros(len(found))  # projected gradient descent to convergence
    step = 1 / (np.linalg.norm(taken @ taken.T, 2) + ridge)
    for _ in range(20_000):
        oracle = np.maximum(oracle - step * (taken @ (taken.T @ oracle - wanted) + ridge * oracle), 0)
    np.testing.assert_allclose(weights, oracle, atol=1e-6)
    assert (weights >= 0).all()
    if not ridge:
        assert (np.diff(errors) <= 1e-12).all()
    np.testing.assert_allclose(errors[-1], np.linalg.norm(taken.T @ weights - wanted) / np.linalg.norm(wanted))


def test_it_takes_no_row_that_points_away_and_refuses_nothing_to_match() -> None:
    found, weights, _ = matching_pursuit(np.array([[-1.0, 0.0], [-2.0, 0.1]]), np.array([1.0, 0.0]), 2)
    assert len(found) == len(weights) == 0
    with pytest.raises(ValueError, match="norm"):
        matching_pursuit(np.eye(2), np.zeros(2), 1)
