"""Stored features read back: a table of the contract `features`, a few rows at a time. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from stages.gradients.quantised import Quantiser

ROWS_AT_ONCE = 256


def decoded(table: pa.Table) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yield (example_ids, feature_BK float32) of a table of features, a few rows at a time.

    All rows have the same bits and dimensions, as those of one artifact do.
    """
    for start in range(0, table.num_rows, ROWS_AT_ONCE):
        part = table.slice(start, ROWS_AT_ONCE)
        quantiser = Quantiser(part.column("dimensions")[0].as_py(), part.column("bits")[0].as_py())
        code_BU = np.frombuffer(b"".join(part.column("code").to_pylist()), np.uint8).reshape(part.num_rows, -1)
        yield part.column("example_id").to_pylist(), quantiser.decode(code_BU, part.column("scale").to_numpy())
