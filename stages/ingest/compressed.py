"""Opening a file as bytes, whatever it is packed in: gzip, zstandard, bzip2, xz, by content and not by name.

The position in the packed file is reported as it is read, so that progress has a total. What is wrong inside a packed
file shows while it is read, as one of `CORRUPT`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

CORRUPT = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
_BUFFER_BYTES = 1 << 18
_ZSTD_BYTES = 1 << 12
"""Packed bytes unpacked at once: a block of 4 bytes may hold 128 KiB, so the worst of them is 128 MiB."""
Advance = Callable[[int], None]


class _Counted(io.RawIOBase):
    """A raw file that reports every byte read."""

    def __init__(self, path: Path, advance: Advance) -> None:
        self._file = path.open("rb", buffering=0)
        self._advance = advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer) or 0
        self._advance(count)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Zstandard(io.RawIOBase):
    """Unpacked zstandard frames, one after another; unlike the library's own reader it tells a file that breaks off."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            packed = (self._frame.unused_data if self._frame.eof else b"") or self._raw.read(_ZSTD_BYTES)
            if not packed:
                if self._begun and not self._frame.eof:
                    raise EOFError("the zstandard stream ends before its end mark")
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._begun = True
            self._ready = memoryview(self._frame.decompress(packed))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Pieces(io.RawIOBase):
    """Unpacked bytes as they come, so that what stands before a break is read; `read` would lose it with the error."""

    def __init__(self, stream: gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._stream.read1(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_bytes(path: Path, advance: Advance) -> BinaryIO:
    """Return the unpacked bytes of `path` as a buffered stream; `advance` is told the packed bytes as they are read."""
    with path.open("rb") as file:
        magic = file.read(6)
    raw = io.BufferedReader(_Counted(path, advance), _BUFFER_BYTES)
    if magic[:2] == b"\x1f\x8b":
        stream: io.RawIOBase = _Pieces(gzip.GzipFile(fileobj=raw))
    elif magic[:4] == b"\x28\xb5\x2f\xfd":
        stream = _Zstandard(raw)
    elif magic[:3] == b"BZh":
        stream = _Pieces(bz2.BZ2File(raw))
    elif magic == b"\xfd7zXZ\x00":
        stream = _Pieces(lzma.LZMAFile(raw))  # noqa: SIM115 - closed with the buffer returned
    else:
        return cast(BinaryIO, raw)
    return cast(BinaryIO, io.BufferedReader(stream, _BUFFER_BYTES))


def is_packed(path: Path) -> bool:
    """Return whether the file's content is one of the packed forms."""
    with path.open("rb") as file:
        magic = file.read(6)
    return (
        magic[:2] == b"\x1f\x8b" or magic[:4] == b"\x28\xb5\x2f\xfd" or magic[:3] == b"BZh" or magic == b"\xfd7zXZ\x00"
    )


def bare_suffix(name: str) -> str:
    """Return the last suffix that says what is inside: `.jsonl` of `pool.jsonl.gz`, "" where there is none."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in SUFFIXES else path.suffix


@lru_cache(maxsize=256)
def bare_stem(name: str) -> str:
    """Return a file's name without its suffixes of format and packing: `pool` of `pool.jsonl.gz`."""
    path = Path(name)
    return Path(path.stem).stem if path.suffix.lower() in SUFFIXES else path.stem
