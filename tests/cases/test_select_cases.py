"""Inputs that broke other selection tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_contracts.config import SelectConfig
from stages.select.plain import select_scores
from stages.select.plain_features import select_embeddings, select_similarities

LOCATION = {"method": "facility_location"}


@pytest.mark.shared
def test_C01_same_item_picked_twice(shared: Path) -> None:
    path = shared / "cases" / "files" / "C01-same-item-picked-twice" / "sim.csv"
    found = [
        select_similarities(path, SelectConfig(count=5, selector=LOCATION), np.random.default_rng(seed)).selection
        for seed in range(3)
    ]
    assert found[0].column("example_id").to_pylist() == ["q3", "q4", "q1", "q2", "q5"]
    assert found[0].column("gain").to_pylist() == [3, 2, 0, 0, 0]
    assert all(again.equals(found[0]) for again in found)


@pytest.mark.shared
def test_C02_nan_similarity_hangs(shared: Path) -> None:
    path = shared / "cases" / "files" / "C02-nan-similarity-hangs" / "emb.jsonl"
    two = select_embeddings(path, SelectConfig(count=2, selector=LOCATION), np.random.default_rng(0))
    assert two.selection.column("example_id").to_pylist() == ["e4", "e1"]
    assert two.selection.column("gain").to_pylist() == [pytest.approx(2.4), pytest.approx(0.4)]
    assert [(item.example_id, item.reason) for item in two.refused] == [("e5", "not_comparable")]
    assert two.notices == ("1 vectors of zeros are like nothing: e3", "1 rows could not be used")
    five = select_embeddings(path, SelectConfig(count=5, selector=LOCATION), np.random.default_rng(0))
    assert five.selection.column("example_id").to_pylist() == ["e4", "e1", "e2", "e3"]
    assert five.selection.column("gain").to_pylist()[2:] == [pytest.approx(0.2), 0]
    assert "all 4 rows were taken" in five.notices[0]


@pytest.mark.shared
def test_C03_nan_scores_rank_first(shared: Path) -> None:
    path = shared / "cases" / "files" / "C03-nan-scores-rank-first" / "scores.jsonl"
    two = select_scores(path, SelectConfig(count=2), np.random.default_rng(0))
    rows = two.selection.to_pylist()
    assert [row["example_id"] for row in rows] == ["s1", "s6"]
    assert [row["gain"] for row in rows] == [pytest.approx(0.9), pytest.approx(0.4)]
    assert two.notices == ()
    assert [(item.example_id, item.reason) for item in two.refused] == [
        ("s2", "not_scorable"),
        ("s4", "not_scorable"),
        ("s5", "not_scorable"),
    ]
    five = select_scores(path, SelectConfig(count=5), np.random.default_rng(0))
    assert five.selection.column("example_id").to_pylist() == ["s1", "s6", "s3"]
    assert five.notices == ("only 3 of 5 could be filled: 3 rows have no valid score",)
