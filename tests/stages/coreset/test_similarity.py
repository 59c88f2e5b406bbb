"""Similarities against plain cosines; the sparse form against the dense one."""

from __future__ import annotations

import numpy as np
import pytest

from stages.coreset.greedy import lazy_greedy
from stages.coreset.objectives import DenseFacilityLocation, SparseFacilityLocation
from stages.coreset.similarity import dense_cosine, fits_dense, nearest_cosine, unit_rows


def test_a_row_of_zeros_is_like_nothing_and_tiny_and_huge_rows_keep_their_direction() -> None:
    feature = np.array([[3.0, 4.0], [0.0, 0.0], [3e-300, 4e-300], [-3e200, -4e200], [1e-40, 0.0]])
    similarity = dense_cosine(unit_rows(feature))
    assert np.isfinite(similarity).all()
    assert not similarity[1].any()
    np.testing.assert_allclose(similarity[0], [1, 0, 1, 0, 0.6], atol=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        unit_rows(np.array([[1.0, np.nan]]))


def test_the_nearest_neighbours_are_those_of_the_dense_matrix_made_symmetric() -> None:
    unit = unit_rows(np.random.default_rng(0).normal(size=(300, 10)))
    unit[7] = 0
    dense = dense_cosine(unit)
    sparse = nearest_cosine(unit, 20).toarray()
    np.testing.assert_allclose(sparse, sparse.T)
    kept = sparse > 0
    np.testing.assert_allclose(sparse[kept], dense[kept], atol=1e-5)
    for row in range(300):
        nearest = np.sort(dense[row])[-20:]
        assert (sparse[row][dense[row] > nearest[0] + 1e-6] > 0).all()
    assert not sparse[7].any()


def test_with_all_neighbours_the_sparse_objective_is_the_dense_one() -> None:
    unit = unit_rows(np.random.default_rng(1).normal(size=(120, 6)))
    rows, gains = lazy_greedy(DenseFacilityLocation(dense_cosine(unit)), 15)
    sparse_rows, sparse_gains = lazy_greedy(SparseFacilityLocation(nearest_cosine(unit, 120)), 15)
    assert rows.tolist() == sparse_rows.tolist()
    np.testing.assert_allclose(gains, sparse_gains, rtol=1e-5)


def test_few_neighbours_reach_nearly_the_dense_objective() -> None:
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(30, 16))
    unit = unit_rows(centres[rng.integers(30, size=1500)] + 0.4 * rng.normal(size=(1500, 16)))
    dense = dense_cosine(unit)
    _, gains = lazy_greedy(DenseFacilityLocation(dense), 60)
    rows, _ = lazy_greedy(SparseFacilityLocation(nearest_cosine(unit, 64)), 60)
    assert dense[rows].max(axis=0).sum() >= 0.97 * gains.sum()


def test_all_pairs_are_held_of_few_rows_alone() -> None:
    assert fits_dense(11_585)
    assert not fits_dense(11_586)
