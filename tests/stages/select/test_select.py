"""The select stage on real tables: order, ties, quotas, and rows without a valid score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.config import SelectConfig
from data_contracts.errors import BudgetError, ConfigError, InputError
from data_contracts.records import Summary
from stages.select.join import exact_for, scores_for
from stages.select.quota import Quota
from stages.select.stage import STAGE, SelectSlice
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of, work_for

IDS = ["a", "b", "c", "d", "e", "f"]
LENGTHS = [10, 20, 30, 40, 50, 60]


def tokens_table(folder: Path, ids: list[str], lengths: list[int], sources: list[str] | None = None) -> Artifact:
    work = LocalWork(folder, {"t": "tokens"})
    work.table(
        "t",
        {
            "example_id": ids,
            "source": sources or ["s"] * len(ids),
            "input_ids": [[1] * length for length in lengths],
            "answer_mask": [[True] * length for length in lengths],
            "n_tokens": lengths,
            "n_answer_tokens": lengths,
            "truncated": [False] * len(ids),
        },
    )
    return work.artifact("t")


def scores_table(folder: Path, scores: dict[str, float | None]) -> Artifact:
    work = LocalWork(folder, {"t": "scores"})
    ids = sorted(scores)
    work.table(
        "t",
        {
            "example_id": ids,
            "source": ["s"] * len(ids),
            "score": [scores[example_id] for example_id in ids],
            "group_scores": [[] for _ in ids],
            "loss": [None] * len(ids),
            "n_tokens": [1] * len(ids),
            "n_answer_tokens": [1] * len(ids),
            "exact": [scores[example_id] is not None for example_id in ids],
        },
    )
    return work.artifact("t")


def run(
    folder: Path, *, scores: dict[str, float | None] | None = None, seed: int = 0, **config: Any
) -> tuple[LocalWork, Summary]:
    given_inputs = {"pool_tokens": tokens_table(folder / "pool", IDS, LENGTHS, ["x", "y", "x", "y", "x", "y"])}
    if scores is not None:
        given_inputs["scores"] = scores_table(folder / "scores", scores)
    given_inputs["target_tokens"] = tokens_table(folder / "target", ["t1", "t2"], [5, 6])
    work = work_for(STAGE, folder / "work", seed=seed)
    return work, STAGE.run(SelectSlice(seed=seed, select=SelectConfig(**config)), inputs_of(**given_inputs), work)


SCORES: dict[str, float | None] = {"a": 0.5, "b": 2.0, "c": None, "d": 0.5, "e": -1.0, "f": 2.0}


def test_top_k_takes_the_highest_scores_and_breaks_ties_by_id(tmp_path: Path) -> None:
    work, _ = run(tmp_path, scores=SCORES, count=4)
    rows = work.rows("selection")
    assert [row["example_id"] for row in rows] == ["b", "f", "a", "d"]
    assert [(row["rank"], row["order"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [row["gain"] for row in rows] == [2.0, 2.0, 0.5, 0.5]
    assert [row["mixture"] for row in rows] == ["y", "y", "x", "y"]
    assert {row["weight"] for row in rows} == {1.0}
    assert rows[0]["reason"] == "score 2, rank 0 of the pool"


def test_a_row_without_a_valid_score_is_listed_and_never_chosen(tmp_path: Path) -> None:
    work, summary = run(tmp_path, scores=SCORES, count=6)
    assert "c" not in [row["example_id"] for row in work.rows("selection")]
    assert [(row["example_id"], row["reason"]) for row in work.rows("quarantine")] == [("c", "not_scorable")]
    assert work.notices == ["only 5 of 6 could be filled: 1 row has no valid score"]
    assert summary.facts["not_scorable"] == 1


def test_a_fraction_is_of_all_pool_rows_so_that_arms_are_of_equal_size(tmp_path: Path) -> None:
    top, _ = run(tmp_path / "top", scores=SCORES, fraction=0.5)
    random, _ = run(tmp_path / "random", selector={"method": "random"}, fraction=0.5)
    assert len(top.rows("selection")) == len(random.rows("selection")) == 3


def test_a_token_budget_takes_the_prefix_that_fits(tmp_path: Path) -> None:
    work, summary = run(tmp_path, scores=SCORES, tokens=89)  # b 20 + f 60 = 80; a would make 90; nothing after it
    assert [row["example_id"] for row in work.rows("selection")] == ["b", "f"]
    assert summary.facts["chosen_tokens"] == 80
    with pytest.raises(BudgetError, match="it has 20"):
        run(tmp_path / "small", scores=SCORES, tokens=19)


def test_a_budget_larger_than_the_pool_takes_all_and_says_so(tmp_path: Path) -> None:
    work, _ = run(tmp_path, selector={"method": "random"}, count=100)
    assert sorted(row["example_id"] for row in work.rows("selection")) == IDS
    assert work.notices == ["the budget (100 rows) is larger than the pool: all 6 rows were taken"]


def test_random_is_uniform_reproducible_and_needs_no_scores(tmp_path: Path) -> None:
    first, _ = run(tmp_path / "1", selector={"method": "random"}, count=2)
    again, _ = run(tmp_path / "2", selector={"method": "random"}, count=2)
    assert first.rows("selection") == again.rows("selection")
    seen = np.zeros(6)
    from stages.select.methods.random import Random
    from stages.select.selector import Candidates

    table = tokens_table(tmp_path / "t", IDS, LENGTHS).table()
    pool = Candidates(table.column("example_id"), table.column("source"), np.array(LENGTHS), None)
    quota = Quota.of(SelectConfig(count=2), 6)
    for seed in range(600):
        seen[Random().select(pool, quota, np.random.default_rng(seed)).rows] += 1
    assert abs(seen - 200).max() < 5 * np.sqrt(600 * (1 / 3) * (2 / 3))


def test_target_rows_stand_behind_the_pools_and_outside_the_quota(tmp_path: Path) -> None:
    work, summary = run(tmp_path, scores=SCORES, count=2, include_target=True)
    rows = work.rows("selection")
    assert [(row["example_id"], row["mixture"]) for row in rows] == [
        ("b", "y"),
        ("f", "y"),
        ("t1", "target"),
        ("t2", "target"),
    ]
    assert summary.facts["target_rows"] == 2


def test_none_of_the_pool_trains_on_the_target_alone_and_only_where_that_is_asked(tmp_path: Path) -> None:
    work, summary = run(tmp_path, count=0, include_target=True, selector={"method": "random"})
    assert [(row["example_id"], row["mixture"]) for row in work.rows("selection")] == [
        ("t1", "target"),
        ("t2", "target"),
    ]
    assert (summary.facts["chosen"], summary.facts["target_rows"]) == (0, 2)
    with pytest.raises(ValueError, match="leaves nothing to train on"):
        SelectConfig(count=0)


def test_top_k_without_scores_and_scores_of_another_pool_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are none"):
        run(tmp_path / "1", count=2)
    with pytest.raises(InputError, match="no example in common"):
        run(tmp_path / "2", scores={"z": 1.0}, count=2)
    with pytest.raises(InputError, match="none of 6 rows has it"):
        run(tmp_path / "3", scores=dict.fromkeys(IDS), count=2)
    with pytest.raises(ConfigError, match="none of fraction, count, tokens"):
        run(tmp_path / "4", scores=SCORES)


def test_new_pool_rows_without_a_score_are_told_of(tmp_path: Path) -> None:
    work, _ = run(tmp_path, scores={"a": 1.0, "c": 3.0, "old": 9.0}, count=2)
    assert [row["example_id"] for row in work.rows("selection")] == ["c", "a"]
    assert work.notices[0].startswith("4 of 6 pool rows stand in no score table")


def test_the_stage_knows_which_scores_were_computed(tmp_path: Path) -> None:
    settings = {"method": "speculative_strata", "strata": 3, "drop": 0.0}  # means −1, 0.5 and 2
    work, _ = run(tmp_path / "1", scores=SCORES, selector=settings, count=2)
    assert {row["example_id"] for row in work.rows("selection")} == {"b", "f"}
    table = scores_table(tmp_path / "2", {"a": 1.0, "b": None, "d": 2.0}).table()
    assert exact_for(pa.chunked_array([IDS]), table).tolist() == [True, False, False, True, False, False]


ids = st.lists(st.text(alphabet="abcdef", min_size=1, max_size=3), unique=True, max_size=30)


@given(ids, ids)
def test_the_merge_of_two_sorted_tables_is_a_dictionary_lookup(pool: list[str], scored: list[str]) -> None:
    pool, scored = sorted(pool), sorted(scored)
    table = pa.table({"example_id": pa.array(scored, pa.string()), "score": pa.array(range(len(scored)), pa.float32())})
    lookup = {example_id: float(index) for index, example_id in enumerate(scored)}
    expected = np.array([lookup.get(example_id, np.nan) for example_id in pool])
    if pool and np.isnan(expected).all():
        with pytest.raises(InputError):
            scores_for(pa.chunked_array([pa.array(pool, pa.string())]), table)
        return
    found, missing = scores_for(pa.chunked_array([pa.array(pool, pa.string())]), table)
    np.testing.assert_array_equal(found, expected)
    assert missing == int(np.isnan(expected).sum())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 600))
def test_a_token_quota_is_the_longest_prefix_within_it(lengths: list[int], tokens: int) -> None:
    order = np.random.default_rng(0).permutation(len(lengths))
    quota = Quota(None, tokens, "")
    if lengths[order[0]] > tokens:
        with pytest.raises(BudgetError):
            quota.fill(order, np.array(lengths))
        return
    taken = quota.fill(order, np.array(lengths))
    total = sum(lengths[row] for row in taken)
    assert list(taken) == list(order[: len(taken)])
    assert total <= tokens
    assert len(taken) == len(order) or total + lengths[order[len(taken)]] > tokens
