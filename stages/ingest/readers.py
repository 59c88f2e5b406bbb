"""One file to its records, by what it is: the only door to the formats of files.

Never raises for what stands inside a file: a record that cannot be read carries its fault, and a file that breaks off
or is not what it says ends with a record of row 0 that says so. No more of a file is held than a record or a batch.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from stages.ingest.columnar import arrow_records, parquet_records
from stages.ingest.compressed import CORRUPT, Advance, bare_suffix, is_packed, open_bytes
from stages.ingest.json_files import json_file
from stages.ingest.lines import json_lines, table_lines, too_long
from stages.ingest.records import Record
from stages.text.refusal import Refused

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


def read_records(path: Path, file: str, limit: int, advance: Advance, scratch: Path) -> Iterator[Record]:
    """Yield the records of one file.

    Args:
        path: the file.
        file: its name in records.
        limit: most bytes of one record.
        advance: told the bytes of the file that were read.
        scratch: a folder for what must be unpacked before it can be read.
    """
    reader = _reader(path)
    try:
        yield from reader(path, file, limit, advance, scratch)
    except Refused as fault:
        yield Record(file, 0, fault=fault)
    except (*CORRUPT, pa.ArrowException) as error:
        detail = f"the file cannot be read to its end: {error or type(error).__name__}; the records before are used"
        yield Record(file, 0, fault=Refused("corrupt", detail, ""))


Reader = Callable[[Path, str, int, Advance, Path], Iterator[Record]]


def _reader(path: Path) -> Reader:
    suffix = bare_suffix(path.name)
    if suffix == ".json":
        return lambda path, file, limit, advance, _: json_file(partial(open_bytes, path, advance), file, limit)
    if suffix in (".csv", ".tsv"):
        return partial(_table, delimiter="\t" if suffix == ".tsv" else ",")
    if suffix == ".parquet":
        return partial(_unpacked, reader=parquet_records)
    if suffix == ".arrow":
        return partial(_unpacked, reader=arrow_records)
    if suffix == ".txt":
        return _document
    return _lines


def _lines(path: Path, file: str, limit: int, advance: Advance, _: Path) -> Iterator[Record]:
    with open_bytes(path, advance) as stream:
        yield from json_lines(stream, file, limit)


def _table(path: Path, file: str, limit: int, advance: Advance, _: Path, *, delimiter: str) -> Iterator[Record]:
    with open_bytes(path, advance) as stream:
        yield from table_lines(stream, file, limit, delimiter)


def _document(path: Path, file: str, limit: int, advance: Advance, _: Path) -> Iterator[Record]:
    """A text file is one row of plain text."""
    with open_bytes(path, advance) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        yield Record(file, 1, 1, fault=too_long(len(data), limit))
        return
    try:
        yield Record(file, 1, 1, {"text": data.decode("utf-8-sig")})
    except UnicodeDecodeError as error:
        detail = f"byte {error.start + 1} (0x{data[error.start]:02x}) is not UTF-8: convert the file"
        yield Record(file, 1, 1, fault=Refused("bad_utf8", detail, ""))


Columns = Callable[[Path, str, int, Advance], Iterator[Record]]


def _unpacked(
    path: Path, file: str, limit: int, advance: Advance, scratch: Path, *, reader: Columns
) -> Iterator[Record]:
    if not is_packed(path):
        yield from reader(path, file, limit, advance)
        return
    with tempfile.TemporaryDirectory(dir=scratch) as folder:  # these formats are read from places, not in order
        bare = Path(folder) / "unpacked"
        with open_bytes(path, advance) as stream, bare.open("wb") as target:
            shutil.copyfileobj(stream, target)
        yield from reader(bare, file, limit, lambda _: None)
