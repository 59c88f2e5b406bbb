"""The forms of top-k, each against its rule said again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ConfigError
from stages.select.methods.top_k import round_robin
from tests.stages.select.pools import chosen, pool_of

COLUMN = np.array([[5.0, 0.0], [4.0, 9.0], [3.0, 8.0], [np.nan, 1.0], [4.0, 2.0]])
SCORE = [1.0, 2.0, 3.0, 4.0, 5.0]


def test_groups_take_turns_and_each_row_names_the_group_that_took_it() -> None:
    found = chosen(pool_of(score=SCORE, column=COLUMN), "top_k", over="round_robin", count=4)
    assert found.rows.tolist() == [0, 1, 4, 2]  # row 1 was group 1's best too; row 3 lacks a group's score
    assert found.table.column("reason").to_pylist() == [
        "the best left for group 1, with 5; rank 0",
        "the best left for group 2, with 9; rank 1",
        "the best left for group 1, with 4; rank 2",
        "the best left for group 2, with 8; rank 3",
    ]
    assert found.table.column("gain").to_pylist() == [5, 9, 4, 8]


def test_max_ranks_by_the_best_group() -> None:
    found = chosen(pool_of(score=SCORE, column=COLUMN), "top_k", over="max", count=3)
    assert found.rows.tolist() == [1, 2, 0]
    assert found.table.column("gain").to_pylist() == [9, 8, 5]
    assert "for group 2" in found.table.column("reason")[0].as_py()
    assert "for group 1" in found.table.column("reason")[2].as_py()


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 15), st.integers(0, 1000), st.booleans())
@settings(deadline=None)
def test_turns_are_those_of_the_plain_loop(rows: int, groups: int, count: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    column = rng.integers(0, 3, (rows, groups)).astype(float) if ties else rng.normal(size=(rows, groups))
    left, expected = list(range(rows)), []
    while left and len(expected) < count:
        group = len(expected) % groups
        expected.append(max(left, key=lambda row: (column[row, group], -row)))
        left.remove(expected[-1])
    got, by = round_robin(column, count)
    assert got.tolist() == expected
    assert by.tolist() == [step % groups for step in range(len(expected))]


def test_a_threshold_takes_the_best_down_to_it_and_says_why_it_ends() -> None:
    notices: list[str] = []
    found = chosen(pool_of(score=SCORE), "top_k", over="threshold", least=3, count=4, notices=notices)
    assert found.rows.tolist() == [4, 3, 2]
    assert notices == ["3 rows were chosen of 4 rows: the others score below 3"]
    notices.clear()
    found = chosen(pool_of(score=SCORE), "top_k", over="threshold", least=3, count=2, notices=notices)
    assert (found.rows.tolist(), notices) == ([4, 3], [])
    found = chosen(pool_of(score=SCORE), "top_k", over="threshold", quantile=0.5, count=5)
    assert found.rows.tolist() == [4, 3, 2]
    with pytest.raises(ConfigError, match="the best scores 5"):
        chosen(pool_of(score=SCORE), "top_k", over="threshold", least=6, count=2)
    same = chosen(pool_of(score=[0.1] * 3), "top_k", over="threshold", least=0.1, count=5)
    assert same.rows.tolist() == [0, 1, 2]  # 0.1 as the scores have it


@pytest.mark.parametrize(
    "setting", [{"over": "threshold"}, {"least": 1}, {"over": "threshold", "least": 1, "quantile": 0.1}]
)
def test_a_threshold_has_one_number_and_the_other_forms_none(setting: dict) -> None:
    with pytest.raises(ConfigError, match="one of `least` and `quantile`"):
        chosen(pool_of(score=SCORE), "top_k", count=1, **setting)


@pytest.mark.parametrize("over", ["round_robin", "max"])
def test_without_groups_the_remedy_is_named(over: str) -> None:
    with pytest.raises(ConfigError, match=r"top_k` over `score`"):
        chosen(pool_of(score=SCORE), "top_k", over=over, count=1)
    with pytest.raises(ConfigError, match="there are none"):
        chosen(pool_of(source=["s"]), "top_k", over=over, count=1)


def test_scores_of_groups_are_not_read_for_a_selector_that_reads_none() -> None:
    def never() -> np.ndarray:
        raise AssertionError("they were made")

    from dataclasses import replace

    pool = replace(pool_of(score=SCORE), columns=never, verified=never)
    assert chosen(pool, "top_k", count=2).rows.tolist() == [4, 3]
    assert len(chosen(pool, "stratified", count=2).rows) == 2
    with pytest.raises(AssertionError, match="they were made"):
        chosen(pool, "bids", count=2)
