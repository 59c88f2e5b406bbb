"""Rows of a chunked column: the values of pyarrow's own take, without its copy of the whole column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from stages.score.places import at


def column(rows: int, chunk: int) -> pa.ChunkedArray:
    return pa.chunked_array(
        [
            pa.array([f"{index:032x}" for index in range(start, min(start + chunk, rows))])
            for start in range(0, rows, chunk)
        ]
    )


@pytest.mark.parametrize("rows", [[], [7], [3, 4, 5], [99, 0, 42, 42], list(range(100))])
def test_values_are_those_of_take_in_the_order_asked_for(rows: list[int]) -> None:
    given = column(100, 7)
    assert at(given, rows).to_pylist() == given.take(pa.array(rows, pa.int64())).to_pylist()
    table = pa.table({"a": given, "b": np.arange(100)})
    assert at(table, np.array(rows, dtype=np.int64)).to_pylist() == table.take(pa.array(rows, pa.int64())).to_pylist()


def test_no_more_is_copied_than_the_stretch_that_holds_the_rows() -> None:
    given = column(100_000, 4096)
    before, pool = pa.total_allocated_bytes(), pa.default_memory_pool()
    taken = at(given, np.arange(50_000, 50_100))
    assert pa.total_allocated_bytes() - before < 20_000
    del taken
    most = pool.max_memory()
    at(given, np.arange(50_000, 50_100))
    assert pool.max_memory() == most
