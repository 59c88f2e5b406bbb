"""k-means against its definition, and beside scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.vq import kmeans2

from stages.coreset.clusters import k_means


def blobs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(6, size=300)
    return 10 * np.eye(6)[truth] + rng.normal(size=(300, 6)), truth


def test_far_apart_blobs_are_found_whatever_the_seed() -> None:
    rows, truth = blobs()
    for seed in range(5):
        label, _ = k_means(rows, 6, np.random.default_rng(seed))
        assert len({(a, b) for a, b in zip(label.tolist(), truth.tolist(), strict=True)}) == 6


def test_it_ends_as_good_as_scipys_and_the_same_again() -> None:
    rows = np.random.default_rng(1).normal(size=(400, 3))
    found = [k_means(rows, 12, np.random.default_rng(seed), iterations=50)[1].sum() for seed in range(5)]
    theirs = []
    for seed in range(5):
        centre, label = kmeans2(rows, 12, iter=50, minit="++", rng=np.random.default_rng(seed))
        theirs.append(np.square(rows - centre[label]).sum())
    assert np.median(found) < 1.05 * np.median(theirs)
    first, again = (k_means(rows, 12, np.random.default_rng(3))[0] for _ in range(2))
    assert (first == again).all()


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([0, 1]))
@settings(max_examples=60, deadline=None)
def test_at_the_end_no_row_is_nearer_to_another_clusters_mean(rows: int, clusters: int, seed: int, whole: int) -> None:
    rng = np.random.default_rng(seed)
    row = rng.normal(size=(rows, 2)) if not whole else rng.integers(0, 3, (rows, 2)).astype(float)
    label, square = k_means(row, clusters, rng, iterations=200)
    used = np.unique(label)
    assert used.tolist() == list(range(len(used)))
    assert len(used) <= min(clusters, len(np.unique(row, axis=0)))
    centre = np.stack([row[label == cluster].mean(axis=0) for cluster in used])
    distance = np.square(row[:, None] - centre[None]).sum(axis=2)
    np.testing.assert_allclose(square, distance.min(axis=1), atol=1e-9)
    np.testing.assert_allclose(square, distance[np.arange(rows), label], atol=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1e8])
def test_far_from_the_origin_distances_do_not_cancel(shift: float) -> None:
    row = np.repeat([[0.0], [1.0], [5.0]], 4, axis=0) + shift
    label, square = k_means(row, 3, np.random.default_rng(0))
    assert len(np.unique(label)) == 3
    np.testing.assert_allclose(square, 0, atol=1e-12)
