"""A record as it was read: the row's place in its file, and its fields or why it has none."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from stages.text.refusal import Refused


@dataclass(slots=True)
class Record:
    """One record of a file.

    `row` counts records from 1 (0: the file, or what is left of it); `line` is the physical line where the record
    starts, for line formats. Exactly one of `value` and `fault` is set.
    """

    file: str
    row: int
    line: int | None = None
    value: dict[str, Any] | None = None
    fault: Refused | None = None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Refused("duplicate_key", f"the key {twice!r} stands twice in one object: which value is meant?", twice)
    return made


def _constant(name: str) -> NoReturn:
    raise Refused("bad_json", f"{name} is not JSON: write null or a number", "")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Refused("bad_json", f"the number {text[:40]} is out of range", "")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant, parse_float=_float)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; `Refused` for bad UTF-8, bad JSON, a key twice, NaN, too deep, no object."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"byte {error.start + 1} of the record (0x{data[error.start]:02x}) is not UTF-8: convert the file"
        raise Refused("bad_utf8", detail, "") from error
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise Refused("too_deep", "the record nests too deeply to be read", "") from error
    except ValueError as error:
        detail = "it holds a NUL byte" if b"\0" in data else str(error)
        raise Refused("bad_json", f"the record is not JSON: {detail}", "") from error
    if not isinstance(value, dict):
        raise Refused("not_an_object", f"the record is a JSON {type(value).__name__}, not an object of fields", "")
    return value
