"""Sorted runs against sorted()."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.ingest.spill import SortedSpill

SCHEMA = pa.schema([("key", pa.string()), ("number", pa.int64())])


@settings(max_examples=25, deadline=None)
@given(keys=st.lists(st.text(alphabet="abc", max_size=3), max_size=200))
def test_rows_come_sorted_and_equal_keys_in_the_order_added(tmp_path_factory, keys: list[str]) -> None:
    spill = SortedSpill(
        tmp_path_factory.mktemp("runs"), SCHEMA, run_bytes=1200
    )  # three rows a run: runs are merged, too
    for i, key in enumerate(keys):
        spill.add((key, i))
    assert list(spill) == sorted([(key, i) for i, key in enumerate(keys)], key=lambda row: row[0])


def test_what_a_killed_attempt_left_is_removed(tmp_path: Path) -> None:
    first = SortedSpill(tmp_path, SCHEMA, run_bytes=1)
    first.add(("a", 1))
    second = SortedSpill(tmp_path, SCHEMA)
    second.add(("b", 2))
    assert list(second) == [("b", 2)]
    second.remove()
    assert not list(tmp_path.iterdir())
