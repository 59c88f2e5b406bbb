"""Tables on disk: Arrow IPC *stream* files, written one way and mapped, never loaded whole.

Fixed rows a batch and zeroed bytes under nulls make equal tables equal files. The stream form is what both pyarrow and
`datasets.Dataset.from_file` read. Nothing here knows what a table means.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from data_contracts.errors import ArtifactError

ROWS_A_BATCH = 1024
TABLE_FILE = "data.arrow"


class TableWriter:
    """Append rows or batches to one stream file; every batch but the last holds `ROWS_A_BATCH` rows.

    Use as a context manager: on an error the half-written file is removed, on success it is flushed to disk.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema, self.rows = path, schema, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, schema)
        self._pending: list[pa.RecordBatch] = []
        self._waiting = 0
        self._rows: list[Mapping[str, Any]] = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row given by column name."""
        self._rows.append(row)
        if len(self._rows) >= ROWS_A_BATCH:
            self._take_rows()

    def extend(self, columns: pa.RecordBatch | pa.Table | Mapping[str, Sequence[Any]]) -> None:
        """Add many rows: a batch, a table, or one sequence a column."""
        self._take_rows()
        if isinstance(columns, pa.Table):
            batches = columns.select(self.schema.names).cast(self.schema).to_batches()
        elif isinstance(columns, pa.RecordBatch):
            batches = [columns.select(self.schema.names).cast(self.schema)]
        else:
            arrays = [pa.array(columns[name], type=self.schema.field(name).type) for name in self.schema.names]
            batches = [pa.RecordBatch.from_arrays(arrays, schema=self.schema)]
        for batch in batches:
            self._pending.append(batch)
            self._waiting += batch.num_rows
        self._flush(all_rows=False)

    def _take_rows(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self.extend({name: [row[name] for row in rows] for name in self.schema.names})

    def _flush(self, all_rows: bool) -> None:
        while self._waiting >= ROWS_A_BATCH or (all_rows and self._waiting):
            table = pa.Table.from_batches(self._pending, schema=self.schema)
            head = table.slice(0, ROWS_A_BATCH)
            rest = table.slice(ROWS_A_BATCH)
            self._stream.write_batch(_clean(head, self.schema))
            self.rows += head.num_rows
            self._pending, self._waiting = rest.to_batches(), rest.num_rows

    def close(self) -> None:
        """Write what is pending and make it durable."""
        self._take_rows()
        self._flush(all_rows=True)
        self._stream.close()
        self._sink.close()
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self._sink.close()
        self.path.unlink(missing_ok=True)


def _clean(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    """Return one batch rebuilt from its values, so that neither chunks, offsets nor bytes under nulls show."""
    arrays = []
    for name in schema.names:
        column = table.column(name)
        chunk = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(chunk, pa.ChunkedArray):
            chunk = pa.concat_arrays(chunk.chunks) if chunk.num_chunks else pa.array([], schema.field(name).type)
        stray = chunk.null_count or chunk.offset or pa.types.is_nested(chunk.type)
        arrays.append(
            pa.array(chunk.to_pylist(), type=chunk.type) if stray else chunk.take(pa.array(range(len(chunk))))
        )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def write_table(path: Path, schema: pa.Schema, columns: pa.Table | Mapping[str, Sequence[Any]]) -> int:
    """Write a whole table that fits in memory and return its rows."""
    with TableWriter(path, schema) as writer:
        writer.extend(columns)
    return writer.rows


def read_table(path: Path) -> pa.Table:
    """Map a stream file; the table's buffers stay on disk. Raises `ArtifactError` for a truncated or foreign file."""
    with _readable(path):
        return _open(path).read_all()


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream file, mapped, one at a time. Raises like `read_table`."""
    with _readable(path):
        yield from _open(path)


def _open(path: Path) -> pa.RecordBatchStreamReader:
    stream = pa.ipc.open_stream(pa.memory_map(str(path)))
    _ = stream.schema.names  # what is no text shows here and not where a column is asked for
    return stream


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            "an Arrow IPC stream file", f"{path} cannot be read: {error}", "make it again: re-run its stage"
        ) from error


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """Yield rows as dictionaries, one batch in memory."""
    for batch in batches:
        yield from batch.to_pylist()
