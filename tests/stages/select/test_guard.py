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
from data_contracts.errors import ConfigError, InputError, MethodError
from stages.select import choose as choosing
from stages.select.choose import choose
from stages.select.plain import read_scores, select_scores
from stages.select.selector import Candidates, Choice
from tests.stages.select.pools import chosen, pool_of

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
        (Choice(np.array([0, 2]), group=np.array([1])), "`group` has 1 values"),
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
    read = read_scores(lines)
    table, refused = read.table, read.refused
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
    read = read_scores(sheet)
    table, refused = read.table, read.refused
    assert table.column("score").to_pylist() == [None, 0.5, None]
    assert table.column("n_tokens").to_pylist() == [4, 3, 5]
    assert [item.example_id for item in refused] == ["a", "c"]
    schema = pa.schema([("example_id", pa.string()), ("score", pa.float32())])
    write_table(tmp_path / "s.arrow", schema, {"example_id": ["q", "p"], "score": [1.0, None]})
    assert read_scores(tmp_path / "s.arrow").table.column("score").to_pylist() == [None, 1.0]
    chosen = select_scores(sheet, SelectConfig(tokens=3), np.random.default_rng(0))
    assert chosen.selection.column("example_id").to_pylist() == ["b"]


def test_scores_of_groups_are_read_by_name_by_place_and_from_columns(tmp_path: Path) -> None:
    lines = tmp_path / "g.jsonl"
    rows = [
        {"id": "a", "group_scores": {"math": 1.0, "code": 3.0}},
        {"id": "b", "score": 9.0, "group_scores": {"code": 0.5, "math": 4.0}, "source": "web", "exact": True},
        {"id": "c", "score": 9.0, "group_scores": {"math": 1.0}},
        {"id": "d", "score": 9.0, "group_scores": {"math": 1.0, "code": "x"}},
        {"id": "e", "score": 9.0},
    ]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_scores(lines)
    assert read.groups == ("math", "code")
    assert read.table.column("score").to_pylist() == [2.0, 9.0, None, None, None]
    assert [item.example_id for item in read.refused] == ["c", "d", "e"]
    assert "its groups are math" in read.refused[0].detail
    assert "group code" in read.refused[1].detail
    np.testing.assert_array_equal(read.candidates().column_NJ[:2], [[1, 3], [4, 0.5]])
    sheet = tmp_path / "g.csv"
    sheet.write_text("id,score.math,score.code,exact\na,1,3,true\nb,4,0.5,False\n")
    read = read_scores(sheet)
    assert read.groups == ("math", "code")
    assert read.candidates().exact_N.tolist() == [True, False]
    turns = SelectConfig(count=2, selector={"method": "top_k", "over": "round_robin"})
    chosen = select_scores(sheet, turns, np.random.default_rng(0)).selection.to_pylist()
    assert [(row["example_id"], row["gain"]) for row in chosen] == [("b", 4.0), ("a", 3.0)]
    assert [row["reason"] for row in chosen] == [
        "the best left for group math, with 4; rank 0",
        "the best left for group code, with 3; rank 1",
    ]
    lines.write_text('{"id": "a", "group_scores": [1, 3]}\n{"id": "b", "group_scores": [4, 0]}\n')
    assert read_scores(lines).groups == ("1", "2")
    lines.write_text('{"id": "a", "score": 1}\n')
    with pytest.raises(ConfigError, match="one group"):
        select_scores(lines, turns, np.random.default_rng(0))


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


def test_rows_that_a_setting_leaves_out_are_said_where_the_quota_had_room_for_them() -> None:
    rng = np.random.default_rng(0)
    pool = pool_of(score=rng.normal(size=40), feature=rng.normal(size=(40, 4)), length=[10] * 40)
    for quota in ({"count": 30}, {"tokens": 300}):
        notices: list[str] = []
        assert len(chosen(pool, "d4", notices=notices, best=0.1, **quota).rows) == 4
        assert [note for note in notices if "d4 as set considers no more" in note], quota
    notices = []
    assert len(chosen(pool, "d4", notices=notices, best=0.1, tokens=45).rows) == 4
    assert notices == []


def test_a_filter_that_drops_every_row_is_named_and_a_count_of_0_needs_none() -> None:
    pool, none = pool_of(score=[1.0, 2.0]), np.zeros(0, dtype=np.int64)
    with pytest.raises(InputError, match="it dropped all 2"):
        choose(SelectConfig(count=1), pool, np.random.default_rng(0), [].append, kept_K=none)
    empty = SelectConfig(count=0, include_target=True)
    found = choose(empty, pool, np.random.default_rng(0), [].append, target_ids=["t"], kept_K=none)
    assert found.table.column("example_id").to_pylist() == ["t"]


@pytest.mark.filterwarnings("error")
def test_plain_rows_with_half_characters_too_many_values_or_too_large_scores_are_refused(tmp_path: Path) -> None:
    lines = ['{"id": "a", "score": 1}', '{"id": "b", "score": 1, "source": "\\ud800"}', '{"id": "c", "score": 1e39}']
    (tmp_path / "s.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = select_scores(tmp_path / "s.jsonl", SelectConfig(count=1), np.random.default_rng(0))
    assert [(row.example_id, row.reason) for row in found.refused] == [("b", "no_source"), ("c", "not_scorable")]
    (tmp_path / "s.csv").write_text("id,score\na,1\nb,2,3\n", encoding="utf-8")
    found = select_scores(tmp_path / "s.csv", SelectConfig(count=2), np.random.default_rng(0))
    assert [(row.row, row.reason) for row in found.refused] == [(2, "bad_csv")]
    assert found.selection.column("example_id").to_pylist() == ["a"]
    (tmp_path / "g.jsonl").write_text('{"id": "a", "score.\\ud800": 1, "score.y": 2}\n{"id": "b", "score": 1}')
    found = select_scores(tmp_path / "g.jsonl", SelectConfig(count=1), np.random.default_rng(0))
    assert found.refused[0].detail == "the name of one of its groups holds half a character"
