"""The sources of a pool's rows as numbers, for selectors that divide what is chosen among them. B rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def coded(sources: pa.ChunkedArray, rows_B: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (source_B, names): the number of each row's source, and what each is called, by name."""
    names = sorted(pc.unique(sources).to_pylist())
    code_N = pc.index_in(sources, value_set=pa.array(names, pa.string())).to_numpy()
    return code_N[rows_B].astype(np.int64), tuple(names)
