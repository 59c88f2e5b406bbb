"""Matching pursuit against known mixtures and a projected-gradient oracle."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from stages.coreset.matching_pursuit import matching_pursuit, pursuit


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


def solved_anew(
    rows: np.ndarray, wanted: np.ndarray, count: int, ridge: float
) -> tuple[list[int], np.ndarray, list[float]]:
    """The same pursuit, all weights solved for from nothing after every row."""
    taken: list[int] = []
    weight, errors, size = np.zeros(0), [], np.linalg.norm(wanted)
    while len(taken) < min(count, len(rows)):
        along = rows @ (wanted - weight @ rows[taken]) if taken else rows @ wanted
        along[taken] = -np.inf
        row = int(along.argmax())
        if along[row] <= 1e-10 * np.linalg.norm(rows[row]) * size:
            break
        taken.append(row)
        damped = np.concatenate([rows[taken].T, np.sqrt(ridge) * np.eye(len(taken))])
        weight = nnls(damped, np.concatenate([wanted, np.zeros(len(taken))]))[0]
        errors.append(float(np.linalg.norm(weight @ rows[taken] - wanted) / size))
    return taken, weight, errors


@given(
    n=st.integers(2, 40),
    width=st.integers(2, 12),
    count=st.integers(1, 30),
    ridge=st.sampled_from([0.0, 0.2]),
    cone=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=80, deadline=None)
def test_going_on_from_the_solution_before_is_solving_anew(
    n: int, width: int, count: int, ridge: float, cone: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows, wanted = rng.normal(size=(n, width)), rng.normal(size=width)
    if cone:  # all rows point into one cone: weights fall to 0, and their rows leave the factor
        rows, wanted = np.abs(rows), np.abs(wanted)
    taken, weight, errors = solved_anew(rows, wanted, count, ridge)
    known = next((at + 1 for at, error in enumerate(errors) if error < 1e-6), len(taken))  # beyond, rounding decides
    found, weights, got = matching_pursuit(rows, wanted, known, ridge=ridge, tolerance=0.0)
    assert found.tolist() == taken[:known]
    np.testing.assert_allclose(got, errors[:known], atol=1e-7)
    if known == len(taken):
        np.testing.assert_allclose(weights @ rows[found], weight @ rows[taken], atol=1e-6)
        if ridge or known <= width:  # more rows than numbers meet the same sum in many ways
            np.testing.assert_allclose(weights, weight, atol=1e-6)


def test_rows_leave_and_come_again_and_the_factor_follows() -> None:
    rng = np.random.default_rng(3)
    rows, wanted = np.abs(rng.normal(size=(40, 15))), np.abs(rng.normal(size=15))
    zeros = [set(np.flatnonzero(step.weight_S == 0).tolist()) for step in pursuit(rows, wanted)]
    left = [later - earlier for earlier, later in pairwise(zeros)]
    back = [earlier - later for earlier, later in pairwise(zeros)]
    assert any(left)
    assert any(back)
    known = sum(step.error > 1e-6 for step in pursuit(rows, wanted)) + 1
    taken, weight, _ = solved_anew(rows, wanted, known, 0.0)
    found, weights, _ = matching_pursuit(rows, wanted, known, tolerance=0.0)
    assert found.tolist() == taken
    np.testing.assert_allclose(weights, weight, atol=1e-8)


def test_a_row_of_zeros_and_a_repeated_row_are_never_needed() -> None:
    rows = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    found, weights, errors = matching_pursuit(rows, np.array([2.0, 1.0]), 5, tolerance=0.0)
    assert found.tolist() == [1, 3]
    np.testing.assert_allclose(weights, [2, 1])
    assert errors[-1] < 1e-15
    assert len(matching_pursuit(rows, np.array([2.0, 1.0]), 0)[0]) == 0
