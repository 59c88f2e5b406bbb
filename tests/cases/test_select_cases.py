"""Inputs that broke other selection tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_contracts.config import SelectConfig
from stages.select.plain import select_scores


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
