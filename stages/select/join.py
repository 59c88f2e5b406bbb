"""Scores and features brought to the rows of the pool: tables sorted by example_id, merged without a hash table.

A pool row that the scores do not hold has no valid score; a score whose row is no longer in the pool is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.errors import InputError


def scores_for(ids: pa.ChunkedArray, scores: pa.Table) -> tuple[np.ndarray, int]:
    """Return (score_N, missing): the score of each id, NaN where it is null or missing, and how many are missing.

    Raises `InputError` where no id is common to both: the scores belong to another pool.
    """
    value = scores.column("score").to_numpy().astype(np.float32)
    row_N = places_of(ids, scores.column("example_id"))
    found_N = row_N >= 0
    if len(ids) and not found_N.any():
        raise InputError(
            "the scores are of this pool", "they have no example in common", "score this pool, or give its own scores"
        )
    score_N = np.full(len(ids), np.nan, dtype=np.float32)
    score_N[found_N] = value[row_N[found_N]]
    return score_N, int((~found_N).sum())


def column_for(ids: pa.ChunkedArray, scores: pa.Table, name: str) -> np.ndarray:
    """Return value_N float32 of column `name` for each id, NaN where it is null or the id is missing."""
    row_N = places_of(ids, scores.column("example_id"))
    value_N = np.full(len(ids), np.nan, dtype=np.float32)
    value_N[row_N >= 0] = scores.column(name).to_numpy().astype(np.float32)[row_N[row_N >= 0]]
    return value_N


def columns_for(ids: pa.ChunkedArray, scores: pa.Table) -> np.ndarray | None:
    """Return column_NJ float32, each id's score for each target group, NaN where it has none; None for one group."""
    groups = scores.column("group_scores")
    width = pc.max(pc.list_value_length(groups)).as_py() or 0
    if width < 2:
        return None
    row_N = places_of(ids, scores.column("example_id"))
    theirs = np.full((len(scores), width), np.nan, dtype=np.float32)
    whole = pc.equal(pc.list_value_length(groups), width).to_numpy()
    theirs[whole] = pc.list_flatten(groups.filter(pa.array(whole))).to_numpy().reshape(-1, width)
    column_NJ = np.full((len(ids), width), np.nan, dtype=np.float32)
    column_NJ[row_N >= 0] = theirs[row_N[row_N >= 0]]
    return column_NJ


def exact_for(ids: pa.ChunkedArray, scores: pa.Table) -> np.ndarray:
    """Return exact_N, whether each id's score was computed rather than predicted; False where it has none."""
    row_N = places_of(ids, scores.column("example_id"))
    exact = scores.column("exact").to_numpy()
    return (row_N >= 0) & exact[row_N] if len(exact) else row_N >= 0


def places_of(ids: pa.ChunkedArray, others: pa.ChunkedArray) -> np.ndarray:
    """Return the row of `others` that each of `ids` stands in, int64, -1 where in none; both sorted."""
    if len(ids) == len(others) and ids.equals(others):
        return np.arange(len(ids))
    row_N = np.full(len(ids), -1, dtype=np.int64)
    other = _numbered(others)
    at = next(other, None)
    for row, example_id in _numbered(ids):
        while at is not None and at[1] < example_id:
            at = next(other, None)
        if at is not None and at[1] == example_id:
            row_N[row] = at[0]
    return row_N


def _numbered(column: pa.ChunkedArray) -> Iterator[tuple[int, str]]:
    row = 0
    for chunk in column.chunks:
        for start in range(0, len(chunk), 1024):
            for example_id in chunk.slice(start, 1024).to_pylist():
                yield row, example_id
                row += 1
