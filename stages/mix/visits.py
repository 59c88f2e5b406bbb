"""What training noted of its visits, by part of the pool: the losses that online mixtures act on.

A table `example_losses` holds one row a visit; its example is looked up among the pool's. Visits of other rows (the
target's) and losses that are not finite are left out. Shapes: V visits, N pool rows, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class Visited:
    """The visits of one segment, in the order made.

    Attributes:
        step_V: int64 optimizer step of the run.
        row_V: int64 row of the pool.
        part_V: int32 part of that row.
        loss_V: float64 nats over the answer tokens, before the step's update.
        tokens_V: int64 answer tokens.
    """

    step_V: np.ndarray
    row_V: np.ndarray
    part_V: np.ndarray
    loss_V: np.ndarray
    tokens_V: np.ndarray


def visited(losses: pa.Table, ids: pa.ChunkedArray, part_N: np.ndarray) -> Visited:
    """Return the visits of pool rows in a table `example_losses`; `ids` are the pool's."""
    names = pc.unique(losses.column("example_id"))
    place_N = pc.index_in(ids, value_set=names).to_numpy()  # NaN for a row that was not visited
    rows = np.flatnonzero(~np.isnan(place_N.astype(np.float64)))
    row_of = np.full(len(names), -1, dtype=np.int64)
    row_of[place_N[rows].astype(np.int64)] = rows
    row_V = row_of[pc.index_in(losses.column("example_id"), value_set=names).to_numpy().astype(np.int64)]
    loss_V = losses.column("loss_sum").to_numpy().astype(np.float64)
    kept = np.flatnonzero((row_V >= 0) & np.isfinite(loss_V))
    row_V = row_V[kept]
    return Visited(
        losses.column("step").to_numpy()[kept],
        row_V,
        part_N[row_V],
        loss_V[kept],
        losses.column("answer_tokens").to_numpy()[kept].astype(np.int64),
    )


def mean_losses(part_V: np.ndarray, loss_V: np.ndarray, tokens_V: np.ndarray, parts: int) -> np.ndarray:
    """Return loss_P, nats an answer token of each part's visits; NaN for a part without any."""
    tokens_P = np.bincount(part_V, tokens_V, minlength=parts)
    sum_P = np.bincount(part_V, loss_V, minlength=parts)
    return np.asarray(np.divide(sum_P, tokens_P, out=np.full(parts, np.nan), where=tokens_P > 0))
