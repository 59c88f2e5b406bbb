"""Spread-out sets against brute force and numpy's determinant."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from stages.coreset.spread import dpp_map, k_center


def radius(feature: np.ndarray, rows: list[int]) -> float:
    return float(np.linalg.norm(feature[:, None] - feature[rows], axis=2).min(axis=1).max())


@pytest.mark.parametrize("seed", range(5))
def test_k_center_is_within_twice_the_best_radius(seed: int) -> None:
    feature = np.random.default_rng(seed).normal(size=(10, 2))
    rows, far = k_center(feature, 3, first=0)
    best = min(radius(feature, list(some)) for some in combinations(range(10), 3))
    assert radius(feature, rows.tolist()) <= 2 * best + 1e-9
    assert far[0] == np.inf
    assert (np.diff(far) <= 1e-9).all()


def test_k_center_takes_every_row_once_even_of_equal_ones() -> None:
    rows, far = k_center(np.ones((4, 3)), 9, first=2)
    assert sorted(rows.tolist()) == [0, 1, 2, 3]
    assert rows[0] == 2
    np.testing.assert_allclose(far[1:], 0, atol=1e-6)


def test_the_gains_of_a_dpp_are_those_of_the_determinant_and_greedy_takes_the_largest() -> None:
    rng = np.random.default_rng(0)
    feature, quality = rng.normal(size=(12, 6)), rng.random(12) + 0.5
    kernel = quality[:, None] * (feature @ feature.T) * quality
    rows, gains = dpp_map(feature, quality, 6)
    chosen: list[int] = []
    before = 0.0
    for row, gain in zip(rows.tolist(), gains, strict=True):
        found = {
            other: np.linalg.slogdet(kernel[np.ix_([*chosen, other], [*chosen, other])])[1]
            for other in range(12)
            if other not in chosen
        }
        assert row == max(found, key=lambda other: found[other])
        np.testing.assert_allclose(gain, found[row] - before, atol=1e-8)
        before = found[row]
        chosen.append(row)


def test_a_dpp_ends_where_nothing_new_is_left() -> None:
    feature = np.repeat(np.eye(3), 4, axis=0)
    rows, _ = dpp_map(feature, np.ones(12), 10)
    assert rows.tolist() == [0, 4, 8]
    assert len(dpp_map(np.zeros((5, 2)), np.ones(5), 3)[0]) == 0
