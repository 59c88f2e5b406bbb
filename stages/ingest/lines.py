"""Records of line formats: JSON lines, and CSV or TSV; one record in memory, a longer one than allowed in none.

A line ends at a line feed (a carriage return before it goes) and at nothing else: U+2028, U+2029 and U+0085 are text.
A CSV cell is text as it stands: `null`, `NA` and `007` are words; only a record with the wrong number of cells is at
fault. A line break inside quotes belongs to the cell.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from stages.ingest.records import Record, parse_object
from stages.text.refusal import Refused

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_SKIP_BYTES = 1 << 16


def too_long(size: int, limit: int) -> Refused:
    """Return the refusal of a record of at least `size` bytes."""
    return Refused("too_long", f"the record has {size} bytes or more, limit {limit}: see ingest.longest_row_bytes", "")


def lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (1-based line number, the line without its end); None for a line of more than `limit` bytes."""
    number = 0
    while line := stream.readline(limit + 3):
        number += 1
        if number == 1:
            if line.startswith(_WIDE_BOMS):
                raise Refused("bad_utf8", "the file is UTF-16: convert it to UTF-8", "")
            line = line.removeprefix(_BOM)
        if not line.endswith(b"\n") and len(line) > limit:
            while (rest := stream.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        yield number, line if len(line) <= limit else None


def json_lines(stream: BinaryIO, file: str, limit: int) -> Iterator[Record]:
    """Yield the records of a JSONL file; lines of white space are none."""
    row = 0
    for number, line in lines(stream, limit):
        if line is not None and not line.strip():
            continue
        row += 1
        if line is None:
            yield Record(file, row, number, fault=too_long(limit + 1, limit))
            continue
        try:
            yield Record(file, row, number, parse_object(line))
        except Refused as fault:
            yield Record(file, row, number, fault=fault)


class _Feed:
    """Lines for the csv module, which counts and joins them; keeps what it must not see."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._lines = lines(stream, limit)
        self.number = 0
        self.oversized = False

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        if line is None:
            self.oversized = True
            line = b""
        return line.decode("utf-8", "surrogateescape") + "\n"


def table_lines(stream: BinaryIO, file: str, limit: int, delimiter: str) -> Iterator[Record]:
    """Yield the records of a CSV or TSV file by the names of its first line (`;` is seen where there is no `,`)."""
    csv.field_size_limit(limit)
    feed = _Feed(stream, limit)
    head = next(feed, "")
    if delimiter == "," and "," not in head and ";" in head:
        delimiter = ";"
    reader, row = csv.reader(chain([head], feed), delimiter=delimiter, strict=True), 0
    try:
        names = next(reader, [])
    except csv.Error as error:
        yield Record(file, 0, 1, fault=Refused("bad_csv", f"the first line is not CSV: {error}", ""))
        return
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or feed.oversized:
        reason, detail = "too_long", "the first line is too long"
        if twice is not None:
            reason, detail = "duplicate_key", f"the column {twice!r} stands twice in the first line"
        yield Record(file, 0, 1, fault=Refused(reason, detail, twice or ""))
        return
    while True:
        start, feed.oversized = feed.number + 1, False
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if not cells and not feed.oversized:
                continue  # an empty line
            row += 1
            yield Record(file, row, start, _cells(names, cells, feed.oversized, limit))
        except csv.Error as error:
            row += 1
            yield Record(file, row, start, fault=Refused("bad_csv", f"the record is not CSV: {error}", ""))
        except Refused as fault:
            yield Record(file, row, start, fault=fault)


def _cells(names: list[str], cells: list[str], oversized: bool, limit: int) -> dict[str, str]:
    if oversized or sum(map(len, cells)) > limit:
        raise too_long(limit + 1, limit)
    if len(cells) != len(names):
        raise Refused("bad_csv", f"the record has {len(cells)} cells, the first line {len(names)}", "")
    for name, cell in zip(names, cells, strict=True):
        if not cell.isascii() and any("\udc80" <= mark <= "\udcff" for mark in cell):
            raise Refused("bad_utf8", "the cell holds bytes that are not UTF-8: convert the file", name)
    return dict(zip(names, cells, strict=True))
