"""What may have moved under a selection: the target it was made for, and the ranking it was made by.

Both compare two tables of one run's rows. Whether it is enough to choose anew is a policy's judgement.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.statistics.rank import spearman

MOST_RANKED = 50_000
"""Rows that are compared, at equal steps: ids are hashes, so that is a random sample (standard error below 0.005)."""


def shared_rows(target: pa.Table, earlier: pa.Table) -> float:
    """Return the share of a target's rows that an earlier target had too: ids are hashes of the content."""
    ids = target.column("example_id")
    there = pc.is_in(ids, value_set=earlier.column("example_id").combine_chunks())
    return float(pc.sum(there).as_py() or 0) / max(1, len(ids))


def agreement(before: pa.Table, now: pa.Table) -> tuple[float, int] | None:
    """Return (Spearman's correlation, rows) of two scorings; None where they share too little to rank.

    Over the rows that both computed by the scorer itself: what a coverage predicts from earlier scores would agree with
    them anyway. Compared is the mean of the columns of each round, which no average over rounds enters; the score where
    there are none.
    """
    rows = np.flatnonzero(now.column("exact").to_numpy())
    if len(rows) > MOST_RANKED:
        rows = rows[np.linspace(0, len(rows) - 1, MOST_RANKED).astype(np.int64)]
    now = now.take(pa.array(rows))
    place = pc.index_in(now.column("example_id"), value_set=before.column("example_id").combine_chunks())
    here = np.flatnonzero(place.is_valid().to_numpy())
    before = before.take(place.drop_null())
    now_N, before_N = own(now.take(pa.array(here))), own(before)
    both = np.isfinite(now_N) & np.isfinite(before_N) & before.column("exact").to_numpy()
    found = spearman(now_N[both], before_N[both])
    return None if found is None else (found, int(both.sum()))


def own(scores: pa.Table) -> np.ndarray:
    """Return what the scorer itself said of each row, float64: the mean of its columns, or the score; NaN for none."""
    columns = scores.column("group_scores").combine_chunks()
    lengths = pc.list_value_length(columns).fill_null(0).to_numpy()
    ends = np.cumsum(lengths)
    sums = np.concatenate([[0.0], np.cumsum(columns.flatten().to_numpy().astype(np.float64))])
    mean_N = (sums[ends] - sums[ends - lengths]) / np.maximum(lengths, 1)
    score_N = scores.column("score").to_numpy().astype(np.float64)
    return np.where(lengths > 0, mean_N, score_N)
