"""What a selector may not return, and what a plain file may not bring in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.arrow import write_table
from data_contracts.config import SelectConfig
from data_contracts.errors import InputError, MethodError
from stages.select import choose as choosing
from stages.select.plain import read_scores, select_scores
from stages.select.selector import Candidates, Choice

POOL = Candidates(
    pa.chunked_array([["a", "b", "c"]]),
    pa.chunked_array([["s", "s", "s"]]),
    np.array([1, 1, 1], dtype=np.int32),
    np.array([1.0, np.nan, 3.0], dtype=np.float32),
)


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (Choice(np.array([0, 0])), "1 rows came twice"),
        (Choice(np.array([3])), "row 3 of 3"),
        (Choice(np.array([-1])), "row -1 of 3"),
        (Choice(np.array([1])), "without what it reads"),
        (Choice(np.array([], dtype=np.int64)), "it chose none"),
        (Choice(np.array([0, 2]), gain=np.array([1.0, np.nan])), "not finite"),
        (Choice(np.array([0, 2]), weights=np.array([1.0])), "`weights` has 1 values"),
    ],
)
def test_a_selector_that_breaks_its_promise_is_named(choice: Choice, found: str) -> None:
    from stages.select.methods.top_k import TopK

    with pytest.raises(MethodError, match=found):
        choosing._guard(TopK(), POOL, POOL.scorable, choice)


def test_csv_and_arrow_scores_are_read_like_json_lines(tmp_path: Path) -> None:
    lines = tmp_path / "s.jsonl"
    rows = [{"id": "b", "score": 0.5, "n_tokens": 3}, {"id": "a", "score": float("nan")}, {"id": "c", "score": "x"}]
    lines.write_text("\n".join(json.dumps(row) for row in rows) + '\nnot json\n{"score": 1}\n{"id": "b", "score": 2}\n')
    table, refused = read_scores(lines)
    assert table.column("example_id").to_pylist() == ["a", "b", "c"]
    assert table.column("score").to_pylist() == [None, 0.5, None]
    assert [(item.row, item.reason) for item in refused] == [
        (2, "not_scorable"),
        (3, "not_scorable"),
        (4, "bad_json"),
        (5, "no_id"),
        (6, "duplicate"),
    ]
    sheet = tmp_path / "s.csv"
    sheet.write_text("\ufeffid,score,tokens\r\nb,0.5,3\r\na,nan,4\r\nc,,5\r\n", encoding="utf-8")
    table, refused = read_scores(sheet)
    assert table.column("score").to_pylist() == [None, 0.5, None]
    assert table.column("n_tokens").to_pylist() == [4, 3, 5]
    assert [item.example_id for item in refused] == ["a", "c"]
    schema = pa.schema([("example_id", pa.string()), ("score", pa.float32())])
    write_table(tmp_path / "s.arrow", schema, {"example_id": ["q", "p"], "score": [1.0, None]})
    assert read_scores(tmp_path / "s.arrow")[0].column("score").to_pylist() == [None, 1.0]
    chosen = select_scores(sheet, SelectConfig(tokens=3), np.random.default_rng(0))
    assert chosen.selection.column("example_id").to_pylist() == ["b"]


def test_a_file_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("")
    (tmp_path / "s.txt").write_text("a 1")
    for name in ("s.jsonl", "s.txt", "absent.jsonl"):
        with pytest.raises(InputError):
            read_scores(tmp_path / name)


def test_selecting_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, stages.select.stage, stages.select.engine, stages.select.plain, stages.select.methods.top_k\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
