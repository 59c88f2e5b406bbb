"""Whether every token id has a row in the embedding, before anything is loaded.

A token added to a tokenizer without growing the model ends in an index error deep in the first batch that holds it (on
an accelerator in a device assert). This finds it in the token table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from data_contracts.errors import ModelError
from data_contracts.records import ModelPin

Place = tuple[str, int, str]
"""Where a row stands: file, 1-based record, and what the user calls it."""


def check_vocabulary(
    pin: ModelPin,
    tables: Sequence[Iterable[pa.RecordBatch]],
    highest: tuple[str, int] | None,
    places: Mapping[str, Place],
) -> str | None:
    """Check `tokens` tables against the embedding; return a warning where the tokenizer goes past it unused.

    Args:
        pin: the model; its grown vocabulary counts where growth was asked for.
        tables: record batches of each table.
        highest: the tokenizer's highest token and its id, None where unknown.
        places: by example_id, where known.

    Raises `ModelError` with the token, its id and the first row that holds it.
    """
    rows = pin.grown_vocabulary or pin.vocabulary
    found = [item for table in tables for batch in table for item in _past(batch, rows)]
    if found:
        example_id, token = min(found, key=lambda item: places.get(item[0], ("", 0, item[0])))
        called = f"'{highest[0]}'" if highest is not None and highest[1] == token else "a token"
        file, row, name = places.get(example_id, ("", 0, example_id))
        raise ModelError(
            f"every token id is below the embedding's {rows} rows",
            f"token {called} has id {token} but the embedding has {rows} rows (0..{rows - 1}); "
            f"{len(found)} row(s) affected, the first: {name}" + (f" ({file}, record {row})" if file else ""),
            "resize the embedding (`ingest.resize_embeddings: true`; it is then trained and saved grown), "
            "or drop the token from the data",
        )
    if highest is not None and highest[1] >= rows:
        return (
            f"the tokenizer's token '{highest[0]}' has id {highest[1]} but the embedding has {rows} rows "
            f"(0..{rows - 1}); no row uses it"
        )
    return None


def places_of(batches: Iterable[pa.RecordBatch]) -> dict[str, Place]:
    """Return where each row of an `examples` table stands; its name is its own `id` where it has one."""
    places = {}
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("example_id", "file", "row", "extra"))
        for example_id, file, row, extra in zip(*columns, strict=True):
            given = json.loads(extra or "{}").get("id")
            places[example_id] = (file, row, example_id if given is None else str(given))
    return places


def _past(batch: pa.RecordBatch, rows: int) -> Iterator[tuple[str, int]]:
    """Yield (example_id, first id past the embedding) of each row that has one."""
    column = batch.column("input_ids")
    values = column.flatten().to_numpy()
    past = np.flatnonzero(values >= rows)
    offsets = column.offsets.to_numpy() - column.offsets[0].as_py()
    owners = np.searchsorted(offsets, past, side="right") - 1
    for row, first in zip(*np.unique(owners, return_index=True), strict=True):
        yield batch.column("example_id")[int(row)].as_py(), int(values[past[first]])
