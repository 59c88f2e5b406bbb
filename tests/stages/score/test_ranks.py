"""Influence through low-rank directions: taken where the error is seen to be small, never where it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stages.score import ranks
from stages.score.methods import influence
from tests.stages.gradients.small_models import rows_of
from tests.stages.score.setting import Setting, make_setting, tokens_of

ROWS = 200
EXACT = {"method": "influence", "rank_error": 0}


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A pool of some rows for which the small model's layers count as wide, and twelve target rows."""
    monkeypatch.setattr(influence, "LOW_RANK_ROWS", ROWS)
    monkeypatch.setattr(ranks, "WIDE_SIDE", 8)
    made = make_setting(tmp_path, pool=rows_of(ROWS, seed=7), checkpoint=True)
    made.inputs["target_tokens"] = tokens_of(tmp_path / "twelve", rows_of(12, seed=5), ["a", "b", "b"] * 4)
    return made


def column(setting: Setting, name: str, scorer: dict[str, object], groups: str = "all") -> tuple[np.ndarray, dict[str, object], int]:  # fmt: skip
    work, summary = setting.score(name, scorer=scorer, groups=groups, batch_tokens=64)
    rows = np.array([row["group_scores"] for row in work.rows("scores")])
    return rows, dict(summary.facts), work.ledger().total.flops


def test_directions_of_full_rank_stay_exact_to_the_last_byte(setting: Setting) -> None:
    """Random moments leave no low rank: at a millionth nothing is cut, and the scores are the exact ones."""
    exact, _, _ = column(setting, "exact", EXACT)
    found, facts, _ = column(setting, "auto", {"method": "influence", "rank_error": 1e-6})
    assert facts["low_rank_layers"] == "0 of 14"
    assert "low_rank_error" not in facts
    np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize(("groups", "moments"), [("all", True), ("source", True), ("source", False)])
def test_the_error_stated_foretells_that_of_the_pool(setting: Setting, groups: str, moments: bool) -> None:
    if not moments:
        del setting.inputs["checkpoint"]
    exact, _, _ = column(setting, "exact", EXACT, groups)
    found, facts, _ = column(setting, "rough", {"method": "influence", "rank_error": 0.4}, groups)
    stated = float(str(facts["low_rank_error"]))
    error = (np.linalg.norm(found - exact, axis=0) / np.linalg.norm(exact, axis=0)).max()
    assert 0.02 < stated <= 0.4
    assert stated / 3 < error < 2 * stated


def test_a_row_of_the_pool_is_charged_less(setting: Setting) -> None:
    """What finding out takes is the same for both pools; each layer's contraction falls to its share."""
    spent, pools = {}, {}
    for rows in (ROWS, 2 * ROWS):
        made = rows_of(rows, seed=7, shortest=12, longest=12)  # no padding
        setting.inputs["pool_tokens"] = tokens_of(setting.folder / f"pool-{rows}", made)
        pools[rows] = sum(len(row.input_ids) for row in made)
        for limit in (0, 0.4):
            scorer = {"method": "influence", "form": "backward", "rank_error": limit}
            _, facts, spent[rows, limit] = column(setting, f"{rows}-{limit}", scorer)
    assert facts["low_rank_layers"] == "14 of 14"
    saved = (spent[2 * ROWS, 0] - spent[ROWS, 0]) - (spent[2 * ROWS, 0.4] - spent[ROWS, 0.4])
    weights = 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16)  # two layers of the tiny model
    tokens = pools[2 * ROWS] - pools[ROWS]
    assert saved == pytest.approx(2 * tokens * weights * (1 - float(str(facts["low_rank_share"]))), rel=2e-3)


def test_a_pool_too_small_to_pay_for_finding_out_is_scored_exactly(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, facts, _ = column(setting, "before", {"method": "influence"})
    assert "low_rank_layers" in facts
    monkeypatch.setattr(influence, "LOW_RANK_ROWS", 20)  # 20 rows may be all: decomposing costs more than they do
    _, facts, flops = column(setting, "after", {"method": "influence"})
    assert "low_rank_layers" not in facts
    assert flops == column(setting, "exact", EXACT)[2]
