"""Equal tables are equal files, however they were written; broken files are refused."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.arrow import ROWS_A_BATCH, TableWriter, read_batches, read_table, rows_of, write_table
from data_contracts.errors import ArtifactError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), False),
        pa.field("n", pa.int32(), True),
        pa.field("x", pa.float64(), True),
        pa.field("flag", pa.bool_(), True),
        pa.field("items", pa.list_(pa.field("item", pa.int32(), False)), True),
    ]
)
ROW = st.fixed_dictionaries(
    {
        "id": st.text(st.characters(codec="utf-8"), max_size=5),
        "n": st.none() | st.integers(-(2**31), 2**31 - 1),
        "x": st.none() | st.floats(allow_nan=False),
        "flag": st.none() | st.booleans(),
        "items": st.none() | st.lists(st.integers(-5, 5), max_size=3),
    }
)


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in SCHEMA.names}


@settings(max_examples=40)
@given(st.lists(ROW, max_size=12), st.lists(st.integers(0, 12), max_size=4), st.data())
def test_the_same_rows_make_the_same_bytes_however_they_arrive(
    rows: list[dict[str, Any]], cuts: list[int], data: st.DataObject
) -> None:
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts = [rows[a:b] for a, b in itertools.pairwise(edges)]
    table = pa.table([pa.array([row[f.name] for row in rows], f.type) for f in SCHEMA], schema=SCHEMA)
    with tempfile.TemporaryDirectory() as folder:
        whole, pieces, sliced = (Path(folder) / name for name in "abc")
        write_table(whole, SCHEMA, columns(rows))
        with TableWriter(pieces, SCHEMA) as writer:
            for part in parts:
                if data.draw(st.booleans()):
                    for row in part:
                        writer.append(row)
                else:
                    writer.extend(columns(part))
        doubled = pa.concat_tables([table, table])  # stray bytes before and after each slice
        with TableWriter(sliced, SCHEMA) as writer:
            for a, b in itertools.pairwise(edges):
                writer.extend(doubled.slice(len(rows) + a, b - a))
        assert whole.read_bytes() == pieces.read_bytes() == sliced.read_bytes()
        assert list(rows_of(read_batches(whole))) == rows
        assert read_table(whole).to_pylist() == rows


def test_bytes_under_nulls_do_not_show(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("x", pa.int32(), True)])
    valid = pa.py_buffer(b"\x01")
    for name, hidden in (("a", 7), ("b", 9)):
        values = pa.Array.from_buffers(pa.int32(), 2, [valid, pa.array([1, hidden], pa.int32()).buffers()[1]])
        write_table(tmp_path / name, schema, pa.table([values], schema=schema))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_table(tmp_path / "a").column("x").to_pylist() == [1, None]


def test_every_batch_but_the_last_has_the_fixed_number_of_rows(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("x", pa.int32(), False)])
    with TableWriter(tmp_path / "x", schema) as writer:
        for start in range(0, 3000, 700):
            writer.extend({"x": list(range(start, min(start + 700, 3000)))})
    assert [batch.num_rows for batch in read_batches(tmp_path / "x")] == [ROWS_A_BATCH, ROWS_A_BATCH, 952]
    assert writer.rows == 3000
    assert read_table(tmp_path / "x").column("x").to_pylist() == list(range(3000))


def test_an_error_inside_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TableWriter(tmp_path / "x", SCHEMA) as writer:
        writer.extend({"id": ["a column alone"]})
    assert not (tmp_path / "x").exists()


def test_a_value_of_another_type_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowInvalid):
        write_table(tmp_path / "x", pa.schema([pa.field("x", pa.int32(), False)]), {"x": ["one"]})
    assert not (tmp_path / "x").exists()


def test_datasets_reads_the_file_as_it_is(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"id": "a", "n": 1, "x": None, "flag": True, "items": [1, 2]}]
    write_table(tmp_path / "x.arrow", SCHEMA, columns(rows))
    assert Dataset.from_file(str(tmp_path / "x.arrow")).to_list() == rows


@pytest.mark.parametrize("cut", [0, 3, 100, -20])
def test_a_truncated_or_foreign_file_is_refused(tmp_path: Path, cut: int) -> None:
    rows = [{"id": str(i), "n": i, "x": 0.5, "flag": True, "items": [i]} for i in range(50)]
    write_table(tmp_path / "x", SCHEMA, columns(rows))
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:cut])
    for read in (read_table, lambda path: list(read_batches(path))):
        with pytest.raises(ArtifactError, match="cannot be read"):
            read(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"not an arrow file at all")
    with pytest.raises(ArtifactError):
        read_table(tmp_path / "x")
