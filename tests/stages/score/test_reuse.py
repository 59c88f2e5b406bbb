"""Rows of an earlier commit are taken over in whole batches, and what is written is what a full run writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data_contracts.arrow import TABLE_FILE
from data_contracts.canonical import file_sha256
from data_contracts.config import ScoreConfig
from stages.model.batch import Row
from stages.score.methods.influence import FORWARD_ROWS
from stages.score.stage import STAGE, ScoreSlice
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.gradients.small_models import VOCABULARY, rows_of
from tests.stages.score.setting import Setting, make_setting, odd_row, tokens_of

GROWN = [Row(f"01-{index:04d}5", row.input_ids, row.answer_mask) for index, row in enumerate(rows_of(4, seed=3))]
CONFIG = {"scorer": {"method": "influence"}, "groups": "source", "batch_tokens": 60}


def run(
    setting: Setting, name: str, rows: list[Row], earlier: LocalWork | None, **config: object
) -> tuple[LocalWork, int]:
    """Score `rows`, offered an earlier work's rows; return the work and how many rows were taken over."""
    inputs = {**setting.inputs, "pool_tokens": tokens_of(setting.folder / f"{name}-pool", rows)}
    offered = None
    if earlier is not None:
        offered = inputs_of(pool_tokens=setting.inputs["pool_tokens"], scores=earlier.artifact("scores"))
    work = work_for(STAGE, setting.folder / name, earlier=offered)
    summary = STAGE.run(ScoreSlice(seed=0, score=ScoreConfig(**{**CONFIG, **config})), inputs_of(**inputs), work)
    return work, int(summary.measured["rows_taken_over"])


def written(work: LocalWork) -> str:
    return file_sha256(work.home / "outputs" / "scores" / TABLE_FILE)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return make_setting(tmp_path, pool=rows_of(60, seed=1), checkpoint=True)


@pytest.mark.parametrize("coverage", ["full", "momentum"])
def test_rows_already_scored_are_taken_over_and_the_bytes_are_those_of_a_full_run(
    setting: Setting, coverage: str
) -> None:
    how = {"coverage": {"method": coverage}}
    first, none = run(setting, "first", rows_of(60, seed=1), None, **how)
    grown = [*rows_of(60, seed=1), *GROWN]
    whole, _ = run(setting, "whole", grown, None, **how)
    part, taken = run(setting, "part", grown, first, **how)
    assert none == 0
    assert 20 <= taken <= 56
    assert written(part) == written(whole)
    assert 0 < part.ledger().total.flops < 0.8 * whole.ledger().total.flops
    again, taken = run(setting, "again", rows_of(60, seed=1), first, **how)
    assert taken == 60
    assert written(again) == written(first)


def test_a_row_of_the_same_id_with_other_tokens_is_scored_again(setting: Setting) -> None:
    first, _ = run(setting, "first", rows_of(60, seed=1), None)
    rows = rows_of(60, seed=1)
    ids = rows[7].input_ids.copy()
    ids[0] = (ids[0] + 1) % VOCABULARY
    rows[7] = replace(rows[7], input_ids=ids)
    whole, _ = run(setting, "whole", rows, None)
    part, taken = run(setting, "part", rows, first)
    assert 40 <= taken < 60
    assert written(part) == written(whole) != written(first)


def test_a_batch_with_a_row_that_failed_is_scored_again(tmp_path: Path) -> None:
    rows = [*rows_of(30, seed=1), odd_row("01-9999", [1, VOCABULARY + 3, 2], [False, True, True])]
    setting = make_setting(tmp_path, pool=rows, checkpoint=True)
    first, _ = run(setting, "first", rows, None)
    again, taken = run(setting, "again", rows, first)
    assert 15 <= taken < 30
    assert written(again) == written(first)
    assert [row["reason"] for row in again.rows("quarantine")] == ["score_failed"]


@pytest.mark.parametrize(
    "scorer",
    [{"method": "random"}, {"method": "less", "dimensions": 64, "store_bits": 8}, {"method": "trak", "dimensions": 64}],
)
def test_a_method_whose_rows_cost_nothing_or_are_not_alone_takes_nothing_over(setting: Setting, scorer) -> None:
    first, _ = run(setting, "first", rows_of(60, seed=1), None, scorer=scorer)
    _, taken = run(setting, "again", rows_of(60, seed=1), first, scorer=scorer)
    assert taken == 0


def test_kin_leaves_out_the_rows_and_what_does_not_decide_them(setting: Setting) -> None:
    def kin(**changed: object) -> object:
        inputs = {**setting.inputs, **{name: value for name, value in changed.items() if name in STAGE.takes}}
        score = {**CONFIG, **{name: value for name, value in changed.items() if name not in STAGE.takes}}
        return STAGE.kin(ScoreSlice(seed=0, score=ScoreConfig(**score)), inputs_of(**inputs))

    other = tokens_of(setting.folder / "other", rows_of(5, seed=9))
    assert kin() == kin(pool_tokens=other)
    assert kin() != kin(target_tokens=other)
    assert kin() != kin(batch_tokens=61)
    assert kin() != kin(scorer={"method": "influence", "per": "token"})
    assert kin(coverage={"method": "momentum"}) is not None
    large = tokens_of(setting.folder / "large", rows_of(FORWARD_ROWS, seed=9))
    assert kin() != kin(pool_tokens=large)  # influence may take its forward form there
    assert kin(scorer={"method": "el2n"}) == kin(scorer={"method": "el2n"}, pool_tokens=large)
    assert kin(coverage={"method": "proxy_verify"}) is None
