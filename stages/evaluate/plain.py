"""Evaluation on plain files: mark a file of predictions; check a training file for evaluation items.

No model is loaded. Rows are JSON lines; a prediction row holds `id`, `reference` and `prediction`, a row of text holds
`messages`, or `prompt` and `completion` (also `question` and `answer`), or `text`. Findings are returned, and whether
they pass; nothing found is never the same as nothing looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from data_contracts.cost import Frozen
from data_contracts.errors import ConfigError, InputError
from data_contracts.method import nearest
from stages.evaluate.marking import mark
from stages.text.answers import METRICS
from stages.text.overlap import Document, Kind, OverlapIndex, document_of

PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))


class Marked(Frozen):
    """One prediction, marked."""

    id: str
    reference: str
    prediction: str
    extracted: str | None
    score: float | None
    note: str


class Predictions(Frozen):
    """A file of predictions, marked; the mean is over the items that have a score, None where none has."""

    metric: str
    items: tuple[Marked, ...]
    mean: float | None
    scored: int


def mark_predictions(path: Path, metric: str) -> Predictions:
    """Mark every row of a predictions file.

    Raises `ConfigError` for an unknown metric, `InputError` for a bad row or a file without one.
    """
    chosen = next((known for known in METRICS if known == metric), None)
    if chosen is None:
        raise ConfigError("a known metric", f"no metric is called {metric!r}", nearest(metric, list(METRICS)))
    items = []
    for number, row in _rows(path):
        values = {name: row.get(name) for name in ("reference", "prediction")}
        missing = [name for name, value in values.items() if not isinstance(value, (str, int, float))]
        if missing:
            raise _bad(path, number, f"no text `{missing[0]}`", "a text `reference` and `prediction` a row")
        reference, prediction = str(values["reference"]), str(values["prediction"])
        marked = mark(prediction, reference, chosen)
        items.append(
            Marked(
                id=str(row.get("id", f"line {number}")),
                reference=reference,
                prediction=prediction,
                extracted=marked.extracted,
                score=marked.score,
                note=marked.note,
            )
        )
    if not items:
        raise InputError("at least one prediction to mark", f"{path.name} holds none", "give the file with the rows")
    scores = [item.score for item in items if item.score is not None]
    mean = sum(scores) / len(scores) if scores else None
    return Predictions(metric=metric, items=tuple(items), mean=mean, scored=len(scores))


class Met(Frozen):
    """An evaluation item that a training row meets."""

    item_id: str
    example_id: str
    kind: Kind
    overlap: float
    detail: str


class Overlap(Frozen):
    """What a check for overlap found."""

    items: int = Field(description="Evaluation items.")
    rows: int = Field(description="Training rows looked at.")
    affected: tuple[str, ...] = Field(description="Evaluation items that are met, in the file's order.")
    meetings: tuple[Met, ...]
    passed: bool = Field(description="Whether no item is met.")


def check_overlap(evaluation: Path, training: Path) -> Overlap:
    """Return where `training` rows meet `evaluation` items. Raises `InputError` for a bad or empty file."""
    index = OverlapIndex(_documents(evaluation))
    meetings, rows = [], 0
    for rows, row in enumerate(_documents(training), start=1):  # noqa: B007 - the last count is the number of rows
        meetings += [Met(**meeting.__dict__) for meeting in index.meet(row)]
    for path, count in ((evaluation, len(index)), (training, rows)):
        if not count:
            raise InputError("at least one row to compare", f"{path.name} holds none", "give the file with the rows")
    met = {meeting.item_id for meeting in meetings}
    affected = tuple(dict.fromkeys(item for item in index.ids if item in met))
    return Overlap(items=len(index), rows=rows, affected=affected, meetings=tuple(meetings), passed=not meetings)


def _documents(path: Path) -> Iterator[Document]:
    for number, row in _rows(path):
        id_ = str(row.get("id", f"line {number}"))
        pair = next(((row[a], row[b]) for a, b in PAIRS if a in row and b in row), None)
        if isinstance(row.get("messages"), list) and all(isinstance(turn, dict) for turn in row["messages"]):
            yield document_of(id_, row["messages"])
        elif pair is not None:
            yield Document(id_, str(pair[0]), str(pair[1]))
        elif isinstance(row.get("text"), str):
            yield Document(id_, "", row["text"])
        else:
            raise _bad(path, number, f"the fields {sorted(row)}", "`messages`, `prompt` and `completion`, or `text`")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:  # not JSON, a number too long, nested too deeply
                        raise _bad(path, number, str(error), "a JSON object a line") from error
                    if not isinstance(row, dict):
                        raise _bad(path, number, f"a {type(row).__name__}", "a JSON object a line")
                    yield number, row
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("a readable file of JSON lines", f"{path.name}: {error}", "mend the file") from error


def _bad(path: Path, number: int, found: str, expected: str) -> InputError:
    return InputError(expected, f"{path.name}, line {number}: {found}", "mend the row or leave it out")
