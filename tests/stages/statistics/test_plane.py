"""The plane of principal components, against a full decomposition in float64."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from stages.statistics.plane import principal_plane


@pytest.mark.parametrize(("count", "width"), [(200, 30), (30, 200), (3, 50), (2, 5), (50, 3)])
def test_it_is_that_of_a_full_decomposition_for_dense_and_sparse_rows(count: int, width: int) -> None:
    rng = np.random.default_rng(0)
    row = rng.normal(size=(count, width)) * np.linspace(3, 1, width) * (rng.random((count, width)) < 0.5) + 1.5
    left, value, _ = np.linalg.svd(row - row.mean(axis=0), full_matrices=False)
    for given in (row, csr_matrix(row), row.astype(np.float32)):
        found, held = principal_plane(given)
        for axis in range(2):
            theirs = left[:, axis] * value[axis]
            assert min(abs(found[:, axis] - theirs).max(), abs(found[:, axis] + theirs).max()) < 1e-4 * value[0]
        assert held == pytest.approx((value[:2] ** 2).sum() / (value**2).sum(), abs=1e-5)
        assert np.array_equal(principal_plane(given)[0], found)


def test_rows_that_are_all_alike_or_one_row_lie_at_the_origin() -> None:
    for row in (np.full((7, 5), 2.0), np.ones((1, 4)), csr_matrix(np.full((7, 5), 2.0)), np.zeros((6, 6))):
        found, held = principal_plane(row)
        assert not found.any()
        assert held == 1.0
