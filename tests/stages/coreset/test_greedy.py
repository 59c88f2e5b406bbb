"""Greedy choices against brute force and against greedy without any shortcut."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from stages.coreset import objectives
from stages.coreset.greedy import lazy_greedy, stochastic_greedy
from stages.coreset.objectives import DenseFacilityLocation, FeatureBased, GraphCut, SparseFacilityLocation
from stages.coreset.similarity import dense_cosine, unit_rows

KINDS = ("dense", "sparse", "cut", "features", "log features")


def value(kind: str, data: np.ndarray, chosen: list[int]) -> float:
    """The objective as its formula says."""
    if not chosen:
        return 0.0
    if kind in ("dense", "sparse"):
        return float(data[chosen].max(axis=0).sum())
    if kind == "cut":
        return float(2.0 * data[:, chosen].sum() - data[np.ix_(chosen, chosen)].sum())
    return float({"features": np.sqrt, "log features": np.log1p}[kind](data[chosen].sum(axis=0)).sum())


def objective(kind: str, data: np.ndarray):
    if kind == "dense":
        return DenseFacilityLocation(data.astype(np.float32))
    if kind == "sparse":
        return SparseFacilityLocation(csr_matrix(data.astype(np.float32)))
    if kind == "cut":
        return GraphCut(data)
    return FeatureBased(data, np.sqrt if kind == "features" else np.log1p)


def gain_of(kind: str, data: np.ndarray, chosen: list[int], row: int) -> float:
    return value(kind, data, [*chosen, row]) - value(kind, data, chosen)


def random_data(kind: str, count: int, seed: int, *, steps: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, steps + 1, (count, count)) / max(steps, 1) if steps else rng.random((count, count))
    data = data.astype(np.float32).astype(np.float64)
    return np.maximum(data, data.T) if kind == "cut" else data


@pytest.mark.parametrize("kind", KINDS)
@given(
    count=st.integers(1, 8), wanted=st.integers(0, 10), seed=st.integers(0, 10_000), steps=st.sampled_from([0, 1, 2])
)
@settings(max_examples=60, deadline=None)
def test_lazy_greedy_is_greedy_and_near_the_best_set(kind: str, count: int, wanted: int, seed: int, steps: int) -> None:
    data = random_data(kind, count, seed, steps=steps)
    rows, gains = lazy_greedy(objective(kind, data), wanted)
    assert len(rows) == len(set(rows.tolist())) == min(wanted, count)
    assert (np.diff(gains) <= 1e-12).all()
    for step, row in enumerate(rows.tolist()):  # what greedy without any shortcut would take next
        gain = {other: gain_of(kind, data, rows[:step].tolist(), other) for other in range(count)}
        best = max(value for other, value in gain.items() if other not in rows[:step])
        np.testing.assert_allclose([gains[step], gain[row]], best, atol=1e-6)
        if steps and "features" not in kind:  # ties are exact in these numbers, and go to the smaller row
            assert row == min(other for other in gain if other not in rows[:step] and gain[other] > best - 1e-9)
    chosen = min(wanted, count)
    best = max(value(kind, data, list(some)) for some in combinations(range(count), chosen))
    assert value(kind, data, rows.tolist()) >= (1 - 1 / np.e) * best - 1e-9
    np.testing.assert_allclose(gains.sum(), value(kind, data, rows.tolist()), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_are_taken_from_the_first_on(kind: str) -> None:
    rows, _ = lazy_greedy(objective(kind, np.ones((6, 6))), 9)
    assert rows.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("few", [1, 5, 1000])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_going_on_with_the_pairs_that_still_gain_changes_no_choice(
    kind: str, steps: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectives, "MOST_LEFT", 1.0)
    monkeypatch.setattr(objectives, "FEWEST_TAKEN", few)
    data = random_data(kind, 150, few, steps=steps)
    made = objective(kind, data)
    rows, gains = lazy_greedy(made, 150)
    assert (made.kept() is None) == (kind == "dense" and few == 1000)
    nearest, left = np.zeros(150), np.ones(150, dtype=bool)
    for row, gain in zip(rows.tolist(), gains, strict=True):
        every = np.where(left, np.maximum(data - nearest, 0).sum(axis=1), -1)
        np.testing.assert_allclose([gain, every[row]], every.max(), atol=1e-4)
        left[row] = False
        nearest = np.maximum(nearest, data[row])


def test_gains_that_are_kept_up_to_date_are_exact_where_numbers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "MOST_LEFT", 1.0)
    monkeypatch.setattr(objectives, "FEWEST_TAKEN", 2)
    data = np.random.default_rng(0).integers(0, 9, (120, 80)).astype(np.float64)
    rows, gains = lazy_greedy(DenseFacilityLocation(data.astype(np.float32)), 120)
    nearest, left = np.zeros(80), np.ones(120, dtype=bool)
    for row, gain in zip(rows.tolist(), gains, strict=True):
        every = np.where(left, np.maximum(data - nearest, 0).sum(axis=1), -1)
        assert (row, gain) == (every.argmax(), every.max())  # ties to the smaller row
        left[row] = False
        nearest = np.maximum(nearest, data[row])


def test_a_gain_that_is_no_number_is_refused_rather_than_waited_for() -> None:
    data = np.ones((3, 3), dtype=np.float32)
    data[1, 1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        lazy_greedy(DenseFacilityLocation(data), 2)


def test_stochastic_greedy_comes_near_greedy_and_repeats_no_row() -> None:
    similarity = dense_cosine(unit_rows(np.random.default_rng(0).normal(size=(400, 12))))
    _, exact = lazy_greedy(DenseFacilityLocation(similarity), 40)
    rows, gains = stochastic_greedy(DenseFacilityLocation(similarity), 40, np.random.default_rng(1))
    again, _ = stochastic_greedy(DenseFacilityLocation(similarity), 40, np.random.default_rng(1))
    assert len(set(rows.tolist())) == 40
    assert rows.tolist() == again.tolist()
    assert gains.sum() > 0.97 * exact.sum()
