"""Selecting from a plain file of scores: JSON lines, CSV or Arrow with an id and a score a row.

A row may hold a score for each target group (`score.NAME`, or `group_scores` as a list or an object; its score is their
mean where it has no other), its source, its length, and whether its score was computed (`exact`). A row with a score
that is missing, not a number or infinite is listed as not scorable and never chosen; one that cannot be read at all is
listed with its line. The same selectors, quotas and guards as in the stage.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.arrow import TABLE_FILE, read_batches, rows_of
from data_contracts.config import SelectConfig
from data_contracts.errors import InputError
from stages.select.choose import choose
from stages.select.selector import Candidates

FLOAT32_MAX = float(np.finfo(np.float32).max)
ID_NAMES = ("example_id", "id")
LENGTH_NAMES = ("n_tokens", "tokens", "length")
GROUP_PREFIX = "score."
"""A field of that name and a group's holds the row's score for the group."""

SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("source", pa.string()),
        ("score", pa.float32()),
        ("n_tokens", pa.int32()),
        ("exact", pa.bool_()),
        ("group_scores", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True)
class Refused:
    """A row that cannot be chosen: its record number (from 1), its id where known, a reason code and a sentence."""

    row: int
    example_id: str | None
    reason: str
    detail: str


@dataclass(frozen=True)
class PlainSelection:
    """The selection (a table of its contract), the rows refused, and what to tell the user."""

    selection: pa.Table
    refused: tuple[Refused, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True)
class PlainScores:
    """A file's rows by id: example_id, source, score (null where not valid), n_tokens and exact (null where not given),
    group_scores (null where not whole); the names of the groups; the rows refused, also those with an invalid score."""

    table: pa.Table
    groups: tuple[str, ...]
    refused: list[Refused]

    def candidates(self, **more: Any) -> Candidates:
        """Return the rows as a pool, with `more` of it."""
        lengths, exact = self.table.column("n_tokens"), self.table.column("exact")
        return Candidates(
            self.table.column("example_id"),
            self.table.column("source"),
            None if lengths.null_count else lengths.to_numpy(),
            self.table.column("score").to_numpy().astype(np.float32),
            self._columns if len(self.groups) > 1 else None,
            None if exact.null_count else exact.to_numpy,
            self.groups,
            **more,
        )

    def _columns(self) -> np.ndarray:
        empty = [float("nan")] * len(self.groups)
        return np.array([row or empty for row in self.table.column("group_scores").to_pylist()], dtype=np.float32)


def read_scores(path: Path) -> PlainScores:
    """Read the rows. Raises `InputError` for a file of another kind or one without an id column."""
    found: dict[str, dict[str, Any]] = {}
    refused: list[Refused] = []
    groups: tuple[str, ...] = ()
    for row, values in _records(path):
        if isinstance(values, Refused):
            refused.append(values)
            continue
        example_id = new_id(row, values, found)
        if isinstance(example_id, Refused):
            refused.append(example_id)
        else:
            names, group_scores, why = _groups(values, groups)
            groups = groups or names
            of_groups = group_scores is not None and values.get("score") in (None, "")
            score, detail = _score(np.mean(group_scores or ()) if of_groups else values.get("score"))
            if why:
                score, detail = None, why
            if score is None:
                refused.append(Refused(row, example_id, "not_scorable", detail))
            length = length_of(values)
            source = str(values.get("source") or path.stem)
            found[example_id] = {
                "example_id": example_id,
                "source": source,
                "score": score,
                "n_tokens": length,
                "exact": _truth(values.get("exact")),
                "group_scores": group_scores,
            }
    if not found:
        raise InputError(
            "a file of scores with an id and a score a row",
            f"{path.name} holds no such row" + (f" ({refused[0].detail})" if refused else ""),
            'write lines such as {"id": "a", "score": 0.5}',
        )
    rows = [found[example_id] for example_id in sorted(found)]
    return PlainScores(pa.Table.from_pylist(rows, schema=SCHEMA), groups, refused)


def select_scores(path: Path, config: SelectConfig, rng: np.random.Generator) -> PlainSelection:
    """Choose from a file of scores. Raises like `read_scores` and `choose`."""
    scores = read_scores(path)
    notices: list[str] = []
    chosen = choose(config, scores.candidates(), rng, notices.append)
    return PlainSelection(chosen.table, tuple(scores.refused), tuple(notices))


def new_id(row: int, values: Mapping[str, Any], found: Container[str]) -> str | Refused:
    """Return the id of record `row`, or why it cannot be taken by id and source; `found` are the ids before it."""
    example_id = next((str(values[name]) for name in ID_NAMES if values.get(name) not in (None, "")), None)
    if example_id is None:
        return Refused(row, None, "no_id", f"it has none of the fields {', '.join(ID_NAMES)}")
    if _broken(example_id):
        return Refused(row, None, "no_id", f"its id {example_id!r} holds half a character")
    if example_id in found:
        return Refused(row, example_id, "duplicate", f"{example_id} stood before; the first row counts")
    if _broken(source := str(values.get("source"))):
        return Refused(row, example_id, "no_source", f"its source {source!r} holds half a character")
    return example_id


def _broken(text: str) -> bool:
    """Return whether the text holds half a character, which JSON can and UTF-8 cannot."""
    return any(0xD800 <= ord(sign) < 0xE000 for sign in text)


def length_of(values: Mapping[str, Any]) -> int | None:
    """Return the row's tokens, None where it does not say."""
    return next((_whole(values[name]) for name in LENGTH_NAMES if values.get(name) not in (None, "")), None)


def _score(value: Any) -> tuple[float | None, str]:
    """Return (score, "") or (None, why not)."""
    if value is None or value == "":
        return None, "it has no score"
    if isinstance(value, bool):
        return None, f"its score is {value!r}, not a number"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None, f"its score is {value!r}, not a number"
    if not abs(number) <= FLOAT32_MAX:
        return None, f"its score is {value!r}, which cannot be ranked"
    return number, ""


def _groups(values: Mapping[str, Any], known: Sequence[str]) -> tuple[tuple[str, ...], list[float] | None, str]:
    """Return (names, scores, ""): the row's groups; scores None where it has none; why, where they are not valid."""
    given = values.get("group_scores") or {
        name.removeprefix(GROUP_PREFIX): value for name, value in values.items() if name.startswith(GROUP_PREFIX)
    }
    if isinstance(given, Sequence) and not isinstance(given, str):
        given = {str(place): value for place, value in enumerate(given, start=1)}
    if not given:
        return (), None, "it has no score for each of several groups" if known else ""
    if not isinstance(given, Mapping):
        return (), None, f"its group scores are {str(given)[:40]!r}"
    if any(_broken(str(name)) for name in given):
        return (), None, "the name of one of its groups holds half a character"
    names = tuple(known or given)
    if set(names) != set(given):
        return (), None, f"its groups are {', '.join(map(str, given))}, the first row's {', '.join(names)}"
    found = []
    for name in names:
        number, detail = _score(given[name])
        if number is None:
            return names, None, f"group {name}: {detail}"
        found.append(number)
    return names, found, ""


def _truth(value: Any) -> bool | None:
    """Return what JSON, CSV or Arrow says, None where it says neither."""
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | Refused]]:
    """Yield (record number, fields by name), or why a record cannot be read."""
    place = path / TABLE_FILE if path.is_dir() else path
    if not place.is_file():
        raise InputError("a file of scores", f"{path.name} is not there", "give a JSON lines, CSV or Arrow file")
    suffix = place.suffix.lower()
    if suffix == ".arrow":
        yield from enumerate(rows_of(read_batches(place)), start=1)
    elif suffix == ".csv":
        with place.open(encoding="utf-8-sig", newline="") as stream:
            for row, values in enumerate(csv.DictReader(stream), start=1):
                if None in values:  # where the reader puts what the header has no name for
                    yield row, Refused(row, None, "bad_csv", f"row {row} has more values than the header has names")
                else:
                    yield row, values
    elif suffix in (".jsonl", ".ndjson"):
        yield from json_lines(place)
    else:
        raise InputError("a JSON lines, CSV or Arrow file of scores", f"{path.name} ends in {suffix!r}", "convert it")


def json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | Refused]]:
    """Yield (line number, its object), or why a line cannot be read; empty lines are no rows."""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if not raw.strip():
                continue
            try:
                value = json.loads(raw.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                yield number, Refused(number, None, "bad_json", f"line {number}: {error}")
                continue
            if isinstance(value, dict):
                yield number, value
            else:
                yield number, Refused(number, None, "bad_json", f"line {number} is no JSON object")
