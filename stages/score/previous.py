"""Earlier rounds' scores, brought to the rows of this pool: tables sorted by example_id, merged a stretch at a time.

A row that an earlier table does not hold has NaN there; a row of its own that left the pool is ignored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

STRETCH = 4096


@dataclass(frozen=True)
class Scoring:
    """One earlier round: its scores, the scorer's own columns, and mean losses; float32, NaN where a row has none."""

    score_N: np.ndarray
    group_NJ: np.ndarray
    loss_N: np.ndarray


def brought(ids: pa.ChunkedArray, scores: pa.Table) -> Scoring:
    """Return the columns of a `scores` table in the order of `ids`; both are sorted."""
    count, theirs = len(ids), _Ids(scores.column("example_id"))
    score_N, loss_N = np.full(count, np.nan, np.float32), np.full(count, np.nan, np.float32)
    group_NJ = np.full((count, _width(scores)), np.nan, np.float32)
    for start in range(0, count, STRETCH):
        mine = ids.slice(start, STRETCH).combine_chunks()
        low, high = bisect_left(theirs, mine[0].as_py()), bisect_left(theirs, mine[-1].as_py() + "\0")
        part = scores.slice(low, high - low)
        place = pc.index_in(mine, value_set=part.column("example_id").combine_chunks())
        here = np.flatnonzero(place.is_valid().to_numpy(zero_copy_only=False))
        there = pa.array(place.drop_null().to_numpy())
        rows, part = start + here, part.take(there)
        score_N[rows] = part.column("score").to_numpy()
        loss_N[rows] = part.column("loss").to_numpy()
        columns = part.column("group_scores").to_pylist()
        filled = [index for index, values in enumerate(columns) if len(values) == group_NJ.shape[1]]
        if filled:
            group_NJ[rows[filled]] = [columns[index] for index in filled]
    return Scoring(score_N, group_NJ, loss_N)


def _width(scores: pa.Table) -> int:
    lengths = pc.list_value_length(scores.column("group_scores"))
    return int(pc.max(lengths).as_py() or 1) if scores.num_rows else 1


class _Ids:
    """A column of ids, each read when asked for."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> str:
        return str(self._column[index].as_py())


def newest_first(ids: pa.ChunkedArray, tables: list[pa.Table]) -> Iterator[Scoring]:
    """Yield each table's columns in the order of `ids`, the last table first, one in memory."""
    for table in reversed(tables):
        yield brought(ids, table)
