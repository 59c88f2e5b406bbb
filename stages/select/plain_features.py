"""Selecting from plain files of embeddings or of similarities, by the selectors that compare rows with each other.

Embeddings: JSON lines with an id and a vector, which may name its source and length; scores of the same ids may come
from a second file. Similarities: a CSV whose first column names the rows and whose header
names the columns, the same in the same order; a value is how well the row's item is covered by the column's. A row that
is no vector of numbers is listed and left out; a vector of zeros is listed and like nothing.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.config import SelectConfig
from data_contracts.errors import InputError
from stages.select.choose import choose
from stages.select.features import Features
from stages.select.join import places_of
from stages.select.plain import PlainSelection, Refused, json_lines, length_of, new_id, read_scores
from stages.select.selector import Candidates

LARGEST = 1e12
"""Beyond it, sums of squares over a file would leave the range of float32."""
VECTOR_NAMES = ("embedding", "vector", "vec", "feature")


def select_embeddings(
    path: Path, config: SelectConfig, rng: np.random.Generator, *, scores: Path | None = None
) -> PlainSelection:
    """Choose from a file of embeddings, with a file of scores of the same rows where one is given.

    A row of the scores without an embedding has no feature; one without a score is left out. Raises `InputError` for a
    file without any, files that share no row, and like `choose`.
    """
    if not path.is_file():
        raise InputError("a JSON lines file of embeddings", f"{path.name} is not there", "give its path")
    found: dict[str, np.ndarray] = {}
    sources: dict[str, str] = {}
    lengths: dict[str, int | None] = {}
    refused: list[Refused] = []
    for row, values in json_lines(path):
        if isinstance(values, Refused):
            refused.append(values)
            continue
        name = new_id(row, values, found)
        vector = next((values[key] for key in VECTOR_NAMES if key in values), None)
        if isinstance(name, Refused):
            refused.append(name)
        elif (detail := _fault(vector, found)) is not None:
            refused.append(Refused(row, name, "not_comparable", detail))
        else:
            found[name] = np.array(vector, dtype=np.float32)
            sources[name], lengths[name] = str(values.get("source") or path.stem), length_of(values)
    if not found:
        first = f" ({refused[0].detail})" if refused else ""
        raise InputError(
            "a file with an id and a vector a row", f"{path.name} holds none{first}", 'write {"id": "a", "vec": [1, 0]}'
        )
    names = sorted(found)
    matrix = np.stack([found[name] for name in names])
    zero = [name for name, row in zip(names, matrix, strict=True) if not row.any()]
    if scores is None:
        every = [lengths[name] for name in names]
        pool = Candidates(
            pa.chunked_array([pa.array(names)]),
            pa.chunked_array([pa.array([sources[name] for name in names])]),
            None if None in every else np.array(every, dtype=np.int32),
            None,
            features=Features(np.arange(len(names)), matrix.shape[1], lambda: iter([matrix])),
        )
    else:
        scored = read_scores(scores)
        refused += scored.refused
        row_n = places_of(pa.chunked_array([pa.array(names)]), scored.table.column("example_id"))
        unscored = [name for name, row in zip(names, row_n.tolist(), strict=True) if row < 0]
        refused += [Refused(0, name, "not_scorable", "it has no score") for name in unscored]
        if len(unscored) == len(names):
            raise InputError(
                "scores and embeddings of the same rows", "they have no id in common", "give both of one pool"
            )
        known = matrix[row_n >= 0]
        pool = scored.candidates(features=Features(row_n[row_n >= 0], matrix.shape[1], lambda: iter([known])))
    plain = _chosen(pool, config, rng, refused)
    notices = list(plain.notices)
    if zero:
        notices.append(f"{len(zero)} vectors of zeros are like nothing: {', '.join(zero[:5])}")
    if refused:
        notices.append(f"{len(refused)} rows could not be used")
    return PlainSelection(plain.selection, plain.refused, tuple(notices))


def select_similarities(path: Path, config: SelectConfig, rng: np.random.Generator) -> PlainSelection:
    """Choose from a square CSV of similarities. Raises `InputError` naming row and column of what is none."""
    if not path.is_file():
        raise InputError("a CSV of similarities", f"{path.name} is not there", "give its path")
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError("a CSV of similarities in UTF-8", f"{path.name}: {error}", "write it anew") from error
    columns = rows[0][1:] if rows else []
    names = [row[0] for row in rows[1:]]
    if not names or names != columns or len(set(names)) != len(names):
        raise InputError(
            "a square CSV whose rows and columns have the same different names",
            f"{path.name} has {len(names)} rows and {len(columns)} columns",
            "write the header `id,a,b` and the rows `a,…` and `b,…` in that order",
        )
    similarity_NN = np.empty((len(names), len(names)), dtype=np.float32)
    for at, row in enumerate(rows[1:]):
        if len(row) != len(names) + 1:
            raise InputError(
                f"{len(names)} similarities a row", f"row {at + 2} of {path.name} has {len(row) - 1}", "mend that row"
            )
        for other in range(len(names)):
            similarity_NN[at, other] = _number(row[other + 1], f"row {at + 2}, column {columns[other]} of {path.name}")
    order = np.array(sorted(range(len(names)), key=names.__getitem__))
    candidate_first = np.ascontiguousarray(similarity_NN[np.ix_(order, order)].T)
    ids, sources = pa.array([names[at] for at in order]), pa.array([path.stem] * len(names))
    pool = Candidates(pa.chunked_array([ids]), pa.chunked_array([sources]), None, None, similarity_NN=candidate_first)
    return _chosen(pool, config, rng, [])


def _chosen(pool: Candidates, config: SelectConfig, rng: np.random.Generator, refused: list[Refused]) -> PlainSelection:
    notices: list[str] = []
    chosen = choose(config, pool, rng, notices.append)
    return PlainSelection(chosen.table, tuple(refused), tuple(notices))


def _fault(vector: Any, found: dict[str, np.ndarray]) -> str | None:
    """Return why `vector` cannot be compared with those found before, None where it can."""
    if not isinstance(vector, list) or not vector:
        return f"it has no list of numbers under any of {', '.join(VECTOR_NAMES)}"
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in vector):
        return "its vector holds something that is no number"
    for place, value in enumerate(vector, start=1):
        if not -LARGEST <= value <= LARGEST:  # not a number, too
            return f"number {place} of its vector is {str(value)[:40]}, beyond ± {LARGEST:g}"
    first = len(next(iter(found.values()), vector))
    return None if first == len(vector) else f"its vector has {len(vector)} numbers, the first had {first}"


def _number(text: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= LARGEST or "_" in text:
        raise InputError(
            f"similarities that are numbers from 0 to {LARGEST:g}", f"{place} is {text[:40]!r}", "mend that value"
        )
    return value
