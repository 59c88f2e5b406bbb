"""Rows sorted by their first column without holding them: sorted runs on disk, merged.

A run is sorted in memory when it has grown to `RUN_BYTES`, and written as an Arrow stream in batches of at most
`BATCH_BYTES`; a merge holds one batch of each run. More than `MOST_RUNS` runs are merged into one first, so neither
memory nor open files grow with the rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

RUN_BYTES = 16 << 20
BATCH_BYTES = 1 << 19
MOST_RUNS = 32
_ROW_BYTES = 400
Row = tuple[Any, ...]


class SortedSpill:
    """Add rows in any order, read them sorted by the first column.

    Args:
        folder: scratch, made if absent; what an earlier attempt left there is removed.
        schema: the columns, the key first.
        run_bytes: memory of one run.
    """

    def __init__(self, folder: Path, schema: pa.Schema, run_bytes: int = RUN_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("run-*.arrow"):
            left.unlink()
        self.folder, self.schema, self.run_bytes = folder, schema, run_bytes
        self.rows = 0
        self._runs: list[Path] = []
        self._made = 0
        self._held: list[Row] = []
        self._bytes = 0

    def add(self, row: Row) -> None:
        """Add one row: a value a column."""
        self._held.append(row)
        self.rows += 1
        self._bytes += _size(row)
        if self._bytes >= self.run_bytes:
            self._spill()

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows in order. Rows of equal keys come in the order they were added."""
        self._spill()
        return heapq.merge(*map(_rows, self._runs), key=lambda row: row[0])

    def _spill(self) -> None:
        if not self._held:
            return
        self._held.sort(key=lambda row: row[0])
        self._runs.append(self._write(self._held))
        self._held, self._bytes = [], 0
        if len(self._runs) > MOST_RUNS:
            merged = self._write(heapq.merge(*map(_rows, self._runs), key=lambda row: row[0]))
            for run in self._runs:
                run.unlink()
            self._runs = [merged]

    def _write(self, rows: Iterable[Row]) -> Path:
        path = self.folder / f"run-{self._made:06d}.arrow"
        self._made += 1
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, self.schema) as stream:
            held: list[Row] = []
            size = 0
            for row in rows:
                held.append(row)
                size += _size(row)
                if size >= BATCH_BYTES:
                    stream.write_batch(self._batch(held))
                    held, size = [], 0
            if held:
                stream.write_batch(self._batch(held))
        return path

    def _batch(self, rows: list[Row]) -> pa.RecordBatch:
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def remove(self) -> None:
        """Delete the runs."""
        for run in self._runs:
            run.unlink(missing_ok=True)
        self._runs = []


def _size(row: Row) -> int:
    return _ROW_BYTES + sum(len(value) for value in row if isinstance(value, (str, bytes)))


def _rows(path: Path) -> Iterator[Row]:
    with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:  # not mapped: a run is read once
        for batch in stream:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
