"""Selectors that divide a quota over strata, clusters or sources: quotas counted from the rows that came."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from data_contracts.errors import ConfigError, InputError
from stages.select.methods.difficulty import centre_of
from stages.select.strata import stratum_of
from tests.stages.select.pools import chosen, pool_of


def test_strata_of_equal_width_give_equally_many_and_the_hardest_stay_out() -> None:
    score = np.concatenate([np.linspace(0, 0.99, 100), np.linspace(1, 1.99, 10), [2.5], [9.0] * 5])
    found = chosen(pool_of(score=score), "stratified", strata=3, drop=5 / 116, count=15)
    taken = score[found.rows]
    assert taken.max() <= 2.5
    # 0–2.5 in three parts: the third (above 1.667) holds 3 + 1 rows, the second (above 0.833) the others
    parts = np.bincount(np.minimum((taken / 2.5 * 3).astype(int), 2), minlength=3)
    assert parts.tolist() == [6, 5, 4]
    assert len({row % 7 for row in found.rows.tolist()}) > 3  # drawn, not the first
    assert found.table.column("reason")[0].as_py().startswith("score ")
    assert " to " in found.table.column("reason")[0].as_py()


def test_strata_of_equal_counts_follow_the_ranks_and_proportional_budgets_the_sizes() -> None:
    score = np.random.default_rng(0).exponential(size=400)
    by_rank = chosen(pool_of(score=score), "stratified", strata=4, cut="quantile", count=40)
    rank = score.argsort().argsort()[by_rank.rows]
    assert np.bincount(rank // 100).tolist() == [10] * 4
    widths = chosen(pool_of(score=score), "stratified", strata=5, budget="proportional", count=80)
    size = np.bincount(stratum_of(score.astype(np.float32), 5, "width"), minlength=5)
    got = np.bincount(stratum_of(score.astype(np.float32), 5, "width")[widths.rows], minlength=5)
    assert (np.abs(got - size / 5) <= 1).all()


@pytest.mark.parametrize("method", ["stratified", "difficulty"])
def test_equal_scores_are_one_stratum(method: str) -> None:
    found = chosen(pool_of(score=[0.5] * 20), method, count=25)
    assert sorted(found.rows.tolist()) == list(range(20))


def test_rows_left_out_by_drop_are_spoken_of() -> None:
    notices: list[str] = []
    chosen(pool_of(score=np.arange(10.0)), "stratified", drop=0.3, count=9, notices=notices)
    assert (
        notices[0] == "7 rows were chosen of 9 rows: the others are among the highest scores, which `drop` leaves out"
    )


def test_budgets_of_speculative_strata_follow_the_computed_scores() -> None:
    rng = np.random.default_rng(0)
    score = np.concatenate([np.full(100, 0.0), np.full(100, 1.0), np.full(100, 3.0), np.full(3, 4.0), np.full(30, 9.0)])
    exact = np.zeros(len(score), dtype=bool)
    exact[[5, 105, 205, 300]] = True
    score[[5, 105, 205]] = [0.5, 1.0, 3.0]
    order = rng.permutation(len(score))
    pool = pool_of(score=score[order], exact=exact[order])
    found = chosen(pool, "speculative_strata", strata=4, drop=30 / 333, count=48)
    taken = np.round(score[order][found.rows])
    # strata of width 1: [0, 1) has mean 0.5, [1, 2) 1, [2, 3) none, [3, 4] the mean of 3 and 4; STAFF's loop, smallest first
    left, weights, expected = 48, {0: 0.5, 1: 1.0, 3: 3.5}, {}
    for name, size in ((1, 100), (0, 100), (3, 103)):
        expected[name] = min(size, left * weights[name] / sum(weights[key] for key in weights if key not in expected))
        left -= expected[name]
    got = Counter(min(int(value), 3) for value in taken)
    assert {name: abs(got[name] - count) <= 1 for name, count in expected.items()} == dict.fromkeys(expected, True)
    with pytest.raises(ConfigError, match="the scores do not say"):
        chosen(pool_of(score=score), "speculative_strata", count=3)
    with pytest.raises(InputError, match="all are predicted"):
        chosen(pool_of(score=score, exact=np.zeros(len(score), dtype=bool)), "speculative_strata", count=3)


def test_a_stratum_that_none_verified_takes_the_nearest_ones_budget_and_top_takes_the_highest() -> None:
    score = np.concatenate([np.linspace(0, 0.9, 50), np.linspace(9, 10, 50)])
    exact = np.zeros(100, dtype=bool)
    exact[0] = True  # mean 0 of the lowest stratum: none of it, until nothing else is left
    exact[99] = True
    pool = pool_of(score=score, exact=exact)
    found = chosen(pool, "speculative_strata", strata=20, drop=0, within="top", count=6)
    assert (score[found.rows] >= 9).all()
    assert 99 in found.rows
    assert (score[found.rows] >= 9.5).sum() == 3  # two strata of one budget


def trajectories() -> tuple[np.ndarray, list[str], np.ndarray]:
    """Two sources: a of 60 rows in three shapes of 30, 20 and 10, b of 12 rows of one shape with one outlier."""
    rng = np.random.default_rng(1)
    shapes = np.array([[3, 2, 1], [1, 1, 1], [3, 3, 3], [2, 1, 0], [9, 9, 9]], dtype=float)
    shape = np.repeat([0, 1, 2, 3, 4], [30, 20, 10, 11, 1])
    return shapes[shape] + 0.01 * rng.normal(size=(72, 3)), ["a"] * 60 + ["b"] * 12, shape


def test_sources_and_their_trajectory_clusters_share_equally_and_the_smallest_is_whole() -> None:
    column, source, shape = trajectories()
    found = chosen(pool_of(column=column, source=source), "trajectory_clusters", clusters=3, count=48)
    got = Counter(shape[found.rows].tolist())
    assert got == {0: 13, 1: 13, 2: 10, 3: 11, 4: 1}  # b whole (12), then 36 of a: 10 whole, 13 and 13
    few = chosen(pool_of(column=column, source=source), "trajectory_clusters", clusters=3, count=20)
    assert Counter(few.table.column("mixture").to_pylist()) == {"a": 10, "b": 10}
    assert 4 not in shape[few.rows]  # alone in its cluster: taken from last
    again = chosen(pool_of(column=column, source=source), "trajectory_clusters", clusters=3, count=20)
    assert again.rows.tolist() == few.rows.tolist()
    assert (
        few.rows.tolist()
        != chosen(
            pool_of(column=column, source=source), "trajectory_clusters", clusters=3, count=20, seed=1
        ).rows.tolist()
    )


def test_scaled_moments_count_alike() -> None:
    rng = np.random.default_rng(0)
    late = np.repeat([0.0, 1.0], [45, 15])  # the second moment tells two kinds apart, the wide first one nothing
    column = np.stack([100 * rng.normal(size=60), late + 0.01 * rng.normal(size=60)], axis=1)
    pool = pool_of(column=column)
    scaled = chosen(pool, "trajectory_clusters", clusters=2, scaled=True, count=24)
    assert late[scaled.rows].sum() == 12  # equal turns of the two kinds
    assert late[chosen(pool, "trajectory_clusters", clusters=2, count=24).rows].sum() < 9


def test_without_trajectories_of_several_moments_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="each of several target groups"):
        chosen(pool_of(score=[1.0, 2.0]), "trajectory_clusters", count=1)


def test_the_window_moves_from_easy_to_hard_with_the_budget() -> None:
    score = np.random.default_rng(0).permutation(1000) / 1000
    for share, centre in ((0.005, 0.3), (0.02, 0.3), (0.1, 0.45), (0.5, 0.6), (0.9, None)):
        found = chosen(pool_of(score=score), "difficulty", fraction=share)
        taken = score[found.rows]
        if centre is not None:
            assert abs(np.median(taken) - centre) < 0.01
            assert np.ptp(taken) < share + 0.01  # nothing but the window
    assert centre_of(0.1, 0.3, 0.6) == pytest.approx(0.45)  # 0.1 is the geometric middle of 0.02 and 0.5
    fixed = chosen(pool_of(score=score), "difficulty", centre=0.9, fraction=0.1)
    assert abs(np.median(score[fixed.rows]) - 0.9) < 0.01
    by_tokens = chosen(pool_of(score=score, length=[7] * 1000), "difficulty", tokens=700)
    assert abs(np.median(score[by_tokens.rows]) - 0.45) < 0.01
    assert "45% quantile" in by_tokens.table.column("reason")[0].as_py()


def test_a_window_behind_a_cascade_lies_among_the_rows_that_were_computed() -> None:
    score = np.concatenate([np.arange(100.0), -1.0 - np.arange(900.0)])  # those that a filter left out stand below
    exact = score >= 0
    found = chosen(pool_of(score=score, exact=exact), "difficulty", centre=0.3, fraction=0.02)
    assert sorted(score[found.rows].tolist()) == list(range(20, 40))
    more = chosen(pool_of(score=score, exact=exact), "difficulty", centre=0.3, fraction=0.15)
    assert exact[more.rows[:100]].all()
    assert not exact[more.rows[100:]].any()
    assert "those that were computed" in found.table.column("reason")[0].as_py()


def test_questions_give_rows_by_their_fail_rates_and_what_one_lacks_goes_to_the_others() -> None:
    source = ["hard"] * 6 + ["mid"] * 50 + ["easy"] * 50 + ["solved"] * 50
    fail = np.array([0.9] * 6 + [0.4] * 50 + [0.1] * 50 + [0.0] * 50)
    found = chosen(pool_of(score=fail, source=source), "difficulty", form="proportional", count=14)
    assert Counter(source[row] for row in found.rows) == {"hard": 6, "mid": 6, "easy": 2}  # 9, 4, 1 asked; 6 there
    few = chosen(pool_of(score=fail, source=source), "difficulty", form="proportional", count=6)
    assert Counter(source[row] for row in few.rows) == {"hard": 4, "mid": 2}  # 3.9, 1.7 and 0.4, rounded
    even = chosen(pool_of(score=fail, source=source), "difficulty", form="uniform", count=20)
    assert Counter(source[row] for row in even.rows) == {"hard": 5, "mid": 5, "easy": 5, "solved": 5}
    with pytest.raises(InputError, match="at least 0"):
        chosen(pool_of(score=-fail, source=source), "difficulty", form="proportional", count=2)
