"""Judging a table that lies in a file."""

from __future__ import annotations

import pytest

from data_contracts.arrow import write_table
from data_contracts.errors import ContractError
from data_contracts.tables import EVALUATION, EXAMPLES
from stages.judge.plain import judge_table
from stages.text.overlap import Document
from tests.stages.judge.tables import losses, rows, table

GATES = [{"method": "better_than_base", "resamples": 999}, {"method": "better_than_champion", "resamples": 999}]


def test_a_table_in_a_file_is_judged_like_one_in_a_run(tmp_path):
    path = tmp_path / "data.arrow"
    write_table(path, EVALUATION.schema, table(rows("base", losses(1, 3.0)), rows("candidate", losses(2, 2.0))))
    assert judge_table(tmp_path, GATES).outcome == "promote"
    assert judge_table(path, [*GATES, {"method": "contamination"}]).outcome == "reject"
    item, row = Document("a", "q", "x"), Document("b", "p", "y")
    clean = judge_table(path, [*GATES, {"method": "contamination"}], holdout=[item], training=[row])
    assert clean.outcome == "promote"
    leaked = judge_table(path, [*GATES, {"method": "contamination"}], holdout=[item], training=[row, item])
    assert leaked.outcome == "reject"


def test_a_champion_in_the_table_must_be_beaten(tmp_path):
    path = tmp_path / "e.arrow"
    parts = [
        rows(model, losses(seed, mean))
        for model, seed, mean in (("base", 1, 3), ("candidate", 2, 2), ("champion", 3, 1))
    ]
    write_table(path, EVALUATION.schema, table(*parts))
    assert judge_table(path, GATES).outcome == "reject"


def test_another_table_is_refused(tmp_path):
    path = tmp_path / "x.arrow"
    write_table(path, EXAMPLES.schema, {name: [] for name in EXAMPLES.schema.names})
    with pytest.raises(ContractError):
        judge_table(path, GATES)
