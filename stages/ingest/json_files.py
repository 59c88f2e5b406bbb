"""Records of a JSON file: a list, `{"data": [...]}`, one object, or JSON lines under another name; never held whole.

The file is scanned once for strings and brackets, so each element is cut out by its place and parsed alone: a broken
element is refused by itself and the next is read. The scan holds one element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from stages.ingest.lines import json_lines, too_long
from stages.ingest.records import Record, parse_object
from stages.text.refusal import Refused

_CHUNK_BYTES = 1 << 18
_MARKS = re.compile(rb'["\\\[\]{},]')
_DATA = re.compile(rb'\s*"data"\s*:\s*\[\Z')


class _Scanner:
    """Cuts the elements of one array out of a stream of bytes, keeping at most `limit` bytes of an element."""

    def __init__(self, stream: BinaryIO, limit: int, line: int) -> None:
        self.stream, self.limit, self.line = stream, limit, line
        self.closed = False
        self._kept, self._size = bytearray(), 0

    def elements(self, first: bytes) -> Iterator[tuple[int, bytes | None]]:
        """Yield (line, element), None for one past the limit; `first` holds the bytes after the array's `[`."""
        depth, in_text, escaped = 0, False, -1  # escaped: where a character stands after a backslash
        chunk, start_line = first, self.line
        while chunk or (chunk := self.stream.read(_CHUNK_BYTES)):
            begin = 0
            for mark in _MARKS.finditer(chunk):
                place, what = mark.start(), mark[0]
                if place == escaped:
                    continue
                if in_text:
                    escaped = place + 1 if what == b"\\" else escaped
                    in_text = what != b'"'
                elif what == b'"':
                    in_text = True
                elif what in b"[{":
                    depth += 1
                elif depth == 0 and what in b",]}":
                    self._keep(chunk[begin:place])
                    begin = place + 1
                    if what == b"," or self._size > self.limit or self._kept.strip():
                        yield start_line + self._leading_lines(), self._element()
                    self._kept, self._size, start_line = bytearray(), 0, self.line
                    if what != b",":
                        self.closed = True
                        return
                elif what in b"]}":
                    depth -= 1
            self._keep(chunk[begin:])
            escaped, chunk = escaped - len(chunk), b""
        if self._size > self.limit or self._kept.strip():
            yield start_line + self._leading_lines(), self._element()

    def _keep(self, piece: bytes) -> None:
        self.line += piece.count(b"\n")
        self._size += len(piece)
        if self._size <= self.limit:
            self._kept += piece

    def _element(self) -> bytes | None:
        return bytes(self._kept) if self._size <= self.limit else None

    def _leading_lines(self) -> int:
        return self._kept[: len(self._kept) - len(self._kept.lstrip())].count(b"\n")


def json_file(reopen: Callable[[], BinaryIO], file: str, limit: int) -> Iterator[Record]:
    """Yield the records of a .json file, whichever of its shapes it has.

    Args:
        reopen: opens the file's bytes from their start.
        file: its name in records.
        limit: most bytes of one record.
    """
    with reopen() as stream:
        head = stream.read(_CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf")
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise Refused("bad_utf8", "the file is UTF-16: convert it to UTF-8", "")
        bare = head.lstrip()
        start = 1 if bare.startswith(b"[") else _data_array(bare)
        if start is not None:
            line = head[: len(head) - len(bare) + start].count(b"\n") + 1
            yield from _array(stream, file, limit, line, bare[start:])
            return
        whole = (head + stream.read(max(limit + 1 - len(head), 0))).strip()
    if b"\n" in whole and _is_object(whole.split(b"\n", 1)[0]):
        with reopen() as stream:
            yield from json_lines(stream, file, limit)
    elif len(whole) > limit:
        yield Record(file, 1, 1, fault=too_long(len(whole), limit))
    elif whole:
        try:
            yield Record(file, 1, 1, parse_object(whole))
        except Refused as fault:
            yield Record(file, 1, 1, fault=fault)


def _array(stream: BinaryIO, file: str, limit: int, line: int, first: bytes) -> Iterator[Record]:
    scanner, row = _Scanner(stream, limit, line), 0
    for number, element in scanner.elements(first):
        row += 1
        if element is None:
            yield Record(file, row, number, fault=too_long(limit + 1, limit))
            continue
        try:
            yield Record(file, row, number, parse_object(element))
        except Refused as fault:
            yield Record(file, row, number, fault=fault)
    if not scanner.closed:
        detail = f"the file ends inside its list, after record {row}: it was cut off"
        yield Record(file, 0, scanner.line, fault=Refused("corrupt", detail, ""))


def _data_array(head: bytes) -> int | None:
    """Return where the elements of a top-level `"data": [` start in the file's first bytes, or None.

    The list must open within the first 256 KiB: members before it are set aside.
    """
    if not head.startswith(b"{"):
        return None
    depth, in_text, member, at = 0, False, 1, 0
    for mark in _MARKS.finditer(head):
        place, what = mark.start(), mark[0]
        if place < at:
            continue
        if in_text:
            if what == b"\\":
                at = place + 2
            in_text = what != b'"'
        elif what == b'"':
            in_text = True
        elif what == b",":
            member = place + 1 if depth == 1 else member
        elif what in b"[{":
            depth += 1
            if what == b"[" and depth == 2 and _DATA.match(head[member : place + 1]):
                return place + 1
        elif what in b"]}":
            depth -= 1
            if depth == 0:
                return None
    return None


def _is_object(line: bytes) -> bool:
    try:
        parse_object(line)
    except Refused as fault:
        return fault.reason == "duplicate_key"
    return True
