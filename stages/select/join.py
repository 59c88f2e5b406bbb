"""Scores brought to the rows of the pool: two tables sorted by example_id, merged without a hash table.

A pool row that the scores do not hold has no valid score; a score whose row is no longer in the pool is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from data_contracts.errors import InputError


def scores_for(ids: pa.ChunkedArray, scores: pa.Table) -> tuple[np.ndarray, int]:
    """Return (score_N, missing): the score of each id, NaN where it is null or missing, and how many are missing.

    Raises `InputError` where no id is common to both: the scores belong to another pool.
    """
    value = scores.column("score").to_numpy().astype(np.float32)
    theirs = scores.column("example_id")
    if len(ids) == len(theirs) and ids.equals(theirs):
        return value, 0
    score_N = np.full(len(ids), np.nan, dtype=np.float32)
    found, other = 0, _numbered(theirs)
    at = next(other, None)
    for row, example_id in _numbered(ids):
        while at is not None and at[1] < example_id:
            at = next(other, None)
        if at is not None and at[1] == example_id:
            score_N[row] = value[at[0]]
            found += 1
    if len(ids) and not found:
        raise InputError(
            "the scores are of this pool", "they have no example in common", "score this pool, or give its own scores"
        )
    return score_N, len(ids) - found


def _numbered(column: pa.ChunkedArray) -> Iterator[tuple[int, str]]:
    row = 0
    for chunk in column.chunks:
        for start in range(0, len(chunk), 1024):
            for example_id in chunk.slice(start, 1024).to_pylist():
                yield row, example_id
                row += 1
