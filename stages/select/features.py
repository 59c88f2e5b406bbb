"""The features of a pool's rows as a selector asks for them: which rows have one, and those of some rows as a matrix.

What is in memory is the matrix that was asked for; the rest stays where it is. Shapes: F rows with a feature, B rows
asked for, K numbers a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data_contracts.errors import InputError
from stages.gradients.stored import decoded
from stages.select.join import places_of


@dataclass(frozen=True)
class Features:
    """Features of some rows of the pool.

    Attributes:
        rows_F: int64 row numbers of the pool, ascending.
        dimensions: K.
        parts: yields their features in that order, float32, some rows at a time.
    """

    rows_F: np.ndarray
    dimensions: int
    parts: Callable[[], Iterator[np.ndarray]]

    def only(self, rows_K: np.ndarray) -> Features:
        """Return the features of the rows `rows_K` (ascending), numbered by their place in it."""
        kept_F = np.isin(self.rows_F, rows_K, assume_unique=True)

        def parts() -> Iterator[np.ndarray]:
            start = 0
            for part_bK in self.parts():
                yield part_bK[kept_F[start : start + len(part_bK)]]
                start += len(part_bK)

        return Features(np.searchsorted(rows_K, self.rows_F[kept_F]), self.dimensions, parts)

    def matrix(self, rows_B: np.ndarray) -> np.ndarray:
        """Return feature_BK float32 of `rows_B`, which all have one."""
        order_B = np.argsort(rows_B, kind="stable")
        wanted_B = np.searchsorted(self.rows_F, rows_B[order_B])
        feature_BK = np.empty((len(rows_B), self.dimensions), dtype=np.float32)
        start = 0
        for part_bK in self.parts():
            here = slice(*np.searchsorted(wanted_B, [start, start + len(part_bK)]))
            feature_BK[order_B[here]] = part_bK[wanted_B[here] - start]
            start += len(part_bK)
        return feature_BK


def features_for(ids: pa.ChunkedArray, table: pa.Table) -> Features:
    """Return the features in `table` (contract `features`) of the pool's rows `ids`, both sorted by id.

    Raises `InputError` where no id is common to both: the features belong to another pool.
    """
    row_T = places_of(table.column("example_id"), ids)
    mine_F = np.flatnonzero(row_T >= 0)
    if not len(mine_F):
        raise InputError(
            "the features are of this pool", "they have no example in common", "give the features that scoring it left"
        )
    known = row_T >= 0

    def parts() -> Iterator[np.ndarray]:
        start = 0
        for found, feature_bK in decoded(table):
            yield feature_bK[known[start : start + len(found)]]
            start += len(found)

    return Features(row_T[mine_F], table.column("dimensions")[0].as_py(), parts)
