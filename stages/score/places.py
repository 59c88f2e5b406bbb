"""Some rows of a long mapped column or table, without a copy of all the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa

Rows = TypeVar("Rows", pa.ChunkedArray, pa.Table)


def at(given: Rows, rows: np.ndarray | Sequence[int]) -> Rows:
    """Return the values at `rows`, in their order.

    pyarrow's `take` first joins all chunks of a text column: a batch of 100 rows copied 36 MB of a million ids (10 ms).
    Here no more is copied than the stretch in which the rows lie, which for a shard's rows is the shard.
    """
    index = np.asarray(rows, dtype=np.int64)
    if not len(index):
        return given.slice(0, 0)
    low = int(index.min())
    return given.slice(low, int(index.max()) - low + 1).take(pa.array(index - low))
