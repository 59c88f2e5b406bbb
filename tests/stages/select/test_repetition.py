"""Few rows often or many once: the curve against brute force, budgets kept, and what the artifact says."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.config import SelectConfig, TrainConfig
from stages.select.quota import Quota
from stages.select.repetition import curve_of
from stages.select.repetitions.core import Core
from stages.select.repetitions.muennighoff import MuennighoffData
from stages.select.selector import Candidates, Choice
from stages.select.stage import STAGE, SelectSlice
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.select.test_select import scores_table, tokens_table

ROWS = st.lists(st.tuples(st.integers(1, 50), st.floats(-1, 5)), min_size=1, max_size=25)
DECAY = 15.387756


def pool_of(lengths: list[int]) -> Candidates:
    ids = pa.chunked_array([pa.array([f"{n:03d}" for n in range(len(lengths))])])
    sources = pa.chunked_array([pa.array(["s"] * len(lengths))])
    return Candidates(ids, sources, np.array(lengths, np.int32), None)


@settings(deadline=None)
@given(ROWS, st.floats(1, 3), st.floats(1, 20))
def test_the_prefix_taken_is_the_best_by_brute_force(rows, passes, most):
    lengths, gains = (list(column) for column in zip(*rows, strict=True))
    budget = float(sum(lengths))
    curve = curve_of(MuennighoffData(most=most), np.cumsum(lengths), np.array(gains), budget, passes)
    values = []
    for k in range(1, len(rows) + 1):
        unique = sum(lengths[:k])
        epochs = min(max(passes * budget / unique, passes), max(most, passes))
        worth = unique + unique * DECAY * (1 - math.exp(-(epochs - 1) / DECAY))
        values.append(sum(gains[:k]) / k * worth)
        assert curve.effective_K[k - 1] == pytest.approx(worth)
    assert curve.value == pytest.approx(values, rel=1e-9, abs=1e-12)
    if max(sum(gains[:k]) / k for k in range(1, len(rows) + 1)) <= 0:
        assert curve.best == len(rows) - 1
    elif max(values) > 0:
        assert values[curve.best] == pytest.approx(max(values), rel=1e-9)


@settings(deadline=None)
@given(ROWS, st.floats(1, 3))
def test_all_visits_stay_within_the_budget_and_use_it_up_to_a_row(rows, passes):
    lengths, gains = (list(column) for column in zip(*rows, strict=True))
    pool, budget = pool_of(lengths), sum(lengths)
    choice = Choice(np.arange(len(rows)), gain=np.array(gains))
    found, curve = MuennighoffData().repeat(pool, Quota(len(rows), None, ""), choice, passes)
    assert curve is not None
    assert found.rows.tolist() == list(range(curve.best + 1))
    assert found.repeats is not None
    visited = int(np.array(lengths)[found.rows] @ found.repeats)
    assert visited <= budget
    assert found.repeats.max() - found.repeats.min() <= 1
    assert (np.diff(found.repeats) <= 0).all()  # the best rows are visited once more
    if curve.epochs_K[curve.best] < 16:
        assert visited > budget - max(lengths)


def test_equal_rows_are_each_seen_once_and_a_steep_ranking_is_repeated():
    unique = np.arange(1, 101) * 10
    law = MuennighoffData()
    assert curve_of(law, unique, None, 1000.0, 1.0).best == 99
    assert curve_of(law, unique, np.ones(100), 1000.0, 1.0).best == 99
    steep = curve_of(law, unique, np.where(np.arange(100) < 20, 1.0, 0.0), 1000.0, 1.0)
    assert steep.best == 19
    assert steep.epochs_K[19] == pytest.approx(5.0)
    assert steep.value[19] > 4 * steep.value[99] * 0.8


@settings(deadline=None)
@given(ROWS, st.floats(0.05, 1), st.floats(1, 5), st.floats(0.2, 1.5))
def test_a_core_is_visited_so_often_and_the_rest_of_the_tokens_goes_to_the_next_rows_once(rows, share, visits, quota):
    lengths, gains = (np.array(column) for column in zip(*rows, strict=True))
    pool, asked = pool_of(lengths.tolist()), max(1, round(quota * len(rows)))
    choice = Choice(np.arange(len(rows))[:asked], gain=gains[:asked], group=np.arange(asked)[: len(rows)])
    found, curve = Core(share=share, visits=visits).repeat(pool, Quota(asked, None, ""), choice, 1.0)
    assert curve is None
    assert found.repeats is not None
    assert found.rows.tolist() == list(range(len(found.rows)))  # a prefix of the ranking, best first
    assert found.gain is not None and found.group is not None  # noqa: PT018
    assert len(found.gain) == len(found.group) == len(found.rows)
    core = min(len(choice.rows), max(1, round(share * len(rows))))
    budget = lengths[choice.rows].sum() * max(1.0, asked / len(choice.rows))
    assert lengths[found.rows] @ found.repeats <= budget + 1e-6
    assert (found.repeats[core:] == 1).all()
    assert found.repeats[:core].max() - found.repeats[:core].min() <= 1
    assert lengths[:core] @ found.repeats[:core] <= max(visits * lengths[:core].sum(), lengths[:core].sum()) + 1e-6
    if len(found.rows) > core:  # others come in only where the core has its visits, to a row
        assert lengths[:core] @ found.repeats[:core] > visits * lengths[:core].sum() - lengths[:core].max()


def test_the_stage_says_how_many_rows_are_a_core(tmp_path: Path) -> None:
    law = {"method": "core", "share": 1 / 6, "visits": 3}
    work, summary = run(tmp_path, fraction=1.0, repetition=law)
    found = [(row["example_id"], row["repeats"]) for row in work.rows("selection")]
    assert found == [("a", 3), ("b", 1), ("c", 1), ("d", 1)]
    assert (summary.facts["repeated_rows"], summary.facts["visited_tokens"]) == (1, 60)
    assert "repetition" not in work.opened


def run(folder: Path, epochs: float = 1.0, **config: object) -> tuple[LocalWork, object]:
    ids = list("abcdef")
    scores = {"a": 4.0, "b": 4.0, "c": 0.1, "d": 0.1, "e": 0.0, "f": -1.0}
    inputs = inputs_of(
        pool_tokens=tokens_table(folder / "pool", ids, [10] * 6), scores=scores_table(folder / "scores", scores)
    )
    work = work_for(STAGE, folder / "work")
    settings = SelectSlice(seed=0, select=SelectConfig(**config), train=TrainConfig(epochs=epochs))
    return work, STAGE.run(settings, inputs, work)


def test_the_stage_leaves_the_whole_curve_and_visits_that_honour_it(tmp_path: Path) -> None:
    work, summary = run(tmp_path, fraction=1.0, repetition={"method": "muennighoff"})
    rows, curve = work.rows("selection"), work.rows("repetition")
    assert [(row["example_id"], row["repeats"]) for row in rows] == [("a", 3), ("b", 3)]
    assert [row["rows"] for row in curve] == [1, 2, 3, 4, 5, 6]
    assert [row["chosen"] for row in curve] == [False, True, False, False, False, False]
    assert curve[1]["epochs"] == pytest.approx(3.0)
    assert curve[1]["effective_tokens"] == pytest.approx(20 + 20 * DECAY * (1 - math.exp(-2 / DECAY)))
    assert curve[1]["quality"] == pytest.approx(4.0)
    assert summary.facts["visited_tokens"] == 60
    assert "Few rows often or many once" in [table.title for table in summary.tables]


def test_passes_of_training_count_as_repetition(tmp_path: Path) -> None:
    work, _ = run(tmp_path, epochs=8.0, fraction=1.0, repetition={"method": "muennighoff"})
    chosen = next(row for row in work.rows("repetition") if row["chosen"])
    assert chosen["epochs"] == pytest.approx(8 * 60 / (10 * chosen["rows"])) or chosen["epochs"] == 16.0
    assert sum(row["repeats"] for row in work.rows("selection")) * 10 <= 60


def test_a_pool_smaller_than_the_budget_is_repeated(tmp_path: Path) -> None:
    work, _ = run(tmp_path, tokens=240, selector={"method": "random"}, repetition={"method": "muennighoff"})
    assert sorted(row["repeats"] for row in work.rows("selection")) == [4] * 6


def test_without_repetition_passes_are_no_part_of_the_identity() -> None:
    one = SelectSlice(seed=0, train=TrainConfig(epochs=1.0))
    two = SelectSlice(seed=0, train=TrainConfig(epochs=2.0, learning_rate=0.1))
    assert STAGE.external(one, Path()) == STAGE.external(two, Path())
    law = SelectConfig(fraction=0.1, repetition={"method": "muennighoff"})
    assert STAGE.external(one.model_copy(update={"select": law}), Path()) != STAGE.external(
        two.model_copy(update={"select": law}), Path()
    )
