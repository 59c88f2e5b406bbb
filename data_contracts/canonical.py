"""One byte string for one value: canonical JSON and the digests made from it.

Promises that equal values have equal bytes on every machine and Python, and that a value without a canonical form
(NaN, a set, an object, a path) is refused instead of being turned into text. What an identity is made *of* is decided
by the runner; how a file tree becomes one digest is decided here, once.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data_contracts.errors import CanonicalError

CHUNK_BYTES = 1 << 20


def canonical(value: Any) -> bytes:
    """Return the canonical JSON of `value`: sorted keys, no spaces, NFC text, finite numbers only.

    Accepts None, bool, int, finite float, str, list/tuple and str-keyed mappings of these. An integral float keeps its
    point (1.0 and 1 differ: a config that changed its type changed). Raises `CanonicalError` for anything else.
    """
    return json.dumps(_plain(value, "$"), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(where, f"the non-finite number {value}")
        return value + 0.0  # -0.0 equals 0.0
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise _refused(where, f"the key {key!r} of type {type(key).__name__}")
            name = _text(key, where)
            if name in plain:
                raise _refused(where, f"the key {name!r} twice, in two Unicode forms")
            plain[name] = _plain(item, f"{where}.{name}")
        return plain
    raise _refused(where, f"a value of type {type(value).__name__}")


def _text(text: str, where: str) -> str:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _refused(where, "text with half of a surrogate pair")
    return unicodedata.normalize("NFC", text)


def _refused(where: str, what: str) -> CanonicalError:
    return CanonicalError(
        "a value that enters an identity is plain JSON data with finite numbers",
        f"{where} holds {what}",
        "pass its content digest, or a plain number, text, list or mapping",
    )


def digest_of(value: Any) -> str:
    """Return the sha256 (64 hex digits) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 (64 hex digits) of a file, read in chunks of 1 MiB."""
    sha = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()


def tree_digest(files: Iterable[tuple[str, int, str]], contract: str) -> str:
    """Return the digest of a payload: sha256 over its sorted (relative path, bytes, sha256) and its contract id."""
    return digest_of({"contract": contract, "files": sorted([path, size, sha] for path, size, sha in files)})
