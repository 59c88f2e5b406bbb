"""The header of a GGUF file: its metadata and the shapes of its tensors, and nothing of the weights.

A thin reader of the published format (ggml, docs/gguf.md, versions 2 and 3, little-endian). It skips over long arrays
such as vocabularies, so that pinning a model takes milliseconds; `gguf_weights.py` reads the weights.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from data_contracts.errors import ModelError

MAGIC, VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (an array is given by its length alone) and tensors by name.

    `shapes` are in torch's order, outermost first; `places` hold (quantisation type, byte where the data starts).
    """

    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    places: dict[str, tuple[int, int]]

    @property
    def parameters(self) -> int:
        """Number of weights in the file."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of `path`, once while the file stays as it is.

    Raises `ModelError` for a file that is not GGUF or is cut short.
    """
    status = path.stat()
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)  # a vocabulary of 49,152 tokens takes 0.3 s to skip
def _read(path: Path, size: int, modified_ns: int) -> GgufHeader:
    try:
        with path.open("rb") as stream:
            magic, version = stream.read(4), _scalar(stream, "<I")
            if magic != MAGIC or version not in VERSIONS:
                raise _refused(path, f"it starts with {magic!r}, version {version}")
            tensors, entries = _scalar(stream, "<Q"), _scalar(stream, "<Q")
            metadata = {}
            for _ in range(entries):
                key = _text(stream)
                metadata[key] = _value(stream, _scalar(stream, "<I"))
            shapes, found = {}, {}
            for _ in range(tensors):
                name = _text(stream)
                sides = [_scalar(stream, "<Q") for _ in range(_scalar(stream, "<I"))]
                shapes[name] = tuple(reversed(sides))
                found[name] = (_scalar(stream, "<I"), _scalar(stream, "<Q"))
            alignment = metadata.get("general.alignment", 32)
            start = -(-stream.tell() // alignment) * alignment
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise _refused(path, f"its header cannot be read: {error}") from error
    return GgufHeader(metadata, shapes, {name: (kind, start + offset) for name, (kind, offset) in found.items()})


def _refused(path: Path, what: str) -> ModelError:
    return ModelError("a GGUF file of version 2 or 3", f"{path.name}: {what}", "download the file again")


def _scalar(stream: BinaryIO, form: str) -> Any:
    return struct.unpack(form, stream.read(struct.calcsize(form)))[0]


def _text(stream: BinaryIO) -> str:
    return stream.read(_scalar(stream, "<Q")).decode()


def _value(stream: BinaryIO, kind: int) -> Any:
    """Return one value; of an array only its length, past which the stream is moved."""
    if kind == _STRING:
        return _text(stream)
    if kind != _ARRAY:
        return _scalar(stream, _SCALARS[kind])
    inner, count = _scalar(stream, "<I"), _scalar(stream, "<Q")
    if inner in _SCALARS:
        stream.seek(count * struct.calcsize(_SCALARS[inner]), 1)
    else:
        for _ in range(count):
            stream.seek(_scalar(stream, "<Q"), 1) if inner == _STRING else _value(stream, inner)
    return count
