"""Records of columnar files: Parquet, and Arrow as stream or file; one batch of rows in memory.

A struct column gives every row the fields of all rows, absent ones as null, so a null inside a struct is taken as
absent: a tool never shows the parameters of another row's tool. A row that has no Python value is refused alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.ingest.compressed import Advance
from stages.ingest.lines import too_long
from stages.ingest.records import Record
from stages.text.refusal import Refused

ROWS_AT_ONCE = 256
_ARROW_FILE = b"ARROW1"
_ROW_ERRORS = (UnicodeDecodeError, ValueError, OverflowError, TypeError, pa.ArrowException)


def parquet_records(path: Path, file: str, limit: int, advance: Advance) -> Iterator[Record]:
    """Yield the rows of a Parquet file. What breaks inside is a record with row 0."""
    with pq.ParquetFile(path, memory_map=True) as table:
        batches = table.iter_batches(batch_size=ROWS_AT_ONCE)
        yield from _records(batches, file, limit, advance, path.stat().st_size / max(table.metadata.num_rows, 1))


def arrow_records(path: Path, file: str, limit: int, advance: Advance) -> Iterator[Record]:
    """Yield the rows of an Arrow IPC file or stream."""
    with pa.memory_map(str(path)) as source:
        if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
            source.seek(0)
            reader = pa.ipc.open_file(source)
            batches: Iterable[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            source.seek(0)
            batches = pa.ipc.open_stream(source)
        yield from _records(batches, file, limit, advance, 0.0)
        advance(path.stat().st_size)


def _records(
    batches: Iterable[pa.RecordBatch], file: str, limit: int, advance: Advance, row_bytes: float
) -> Iterator[Record]:
    row = 0
    for whole in batches:
        structs = [field.name for field in whole.schema if pa.types.is_nested(field.type)]
        names = whole.schema.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise Refused("duplicate_key", f"the column {twice!r} stands twice", twice)
        for start in range(0, whole.num_rows, ROWS_AT_ONCE):
            batch = whole.slice(start, ROWS_AT_ONCE)
            for value in _values(batch):
                row += 1
                if isinstance(value, Refused):
                    yield Record(file, row, fault=value)
                    continue
                for name in structs:
                    value[name] = _without_nulls(value[name])
                size = sum(len(item) for item in value.values() if isinstance(item, (str, bytes)))
                if size > limit:
                    yield Record(file, row, fault=too_long(size, limit))
                else:
                    yield Record(file, row, value=value)
            advance(round(row_bytes * batch.num_rows))


def _values(batch: pa.RecordBatch) -> list[dict[str, Any] | Refused]:
    try:
        return batch.to_pylist(maps_as_pydicts="lossy")
    except _ROW_ERRORS:
        return [_value(batch.slice(i, 1)) for i in range(batch.num_rows)]


def _value(row: pa.RecordBatch) -> dict[str, Any] | Refused:
    value = {}
    for name in row.schema.names:
        try:
            value[name] = row.column(name).to_pylist(maps_as_pydicts="strict")[0]
        except UnicodeDecodeError:
            return Refused("bad_utf8", "the text is not UTF-8", name)
        except (KeyError, *_ROW_ERRORS) as error:
            return Refused("bad_value", f"the value cannot be read: {error}", name)
    return value


def _without_nulls(value: Any) -> Any:
    """Drop null fields of structs, at every depth; nulls in lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
