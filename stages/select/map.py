"""A selection as a map: a sample of pool, target and selection as points of a plane, with how each text begins.

The planes there are: the first two principal components of the features that scoring left (the target has none), those
of hashed words where texts are given (target included), else score against length. Bounded: `MOST` points of each kind,
drawn by the seed, and at most `MOST_BYTES` of features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from stages.coreset.similarity import unit_rows
from stages.select.view import Viewed, closest_pairs
from stages.stage import Artifact
from stages.statistics.plane import principal_plane
from stages.text.examples import beginning, text_of
from stages.text.hashed import LONGEST, hashed_rows

MOST = {"pool": 1500, "chosen": 1000, "dropped as noise": 500, "target": 500}
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Points:
    """The rows that are drawn: kind by kind, with their texts, and how many there are of each kind.

    `row_M` are pool rows, or rows of the target's table.
    """

    kind_M: np.ndarray
    row_M: np.ndarray
    ids: list[str]
    texts: list[str]
    count_of: dict[str, int]

    def sampled(self, point_P: np.ndarray) -> str:
        """Return how many rows of each kind these points are, of how many there are."""
        kind_P = self.kind_M[point_P]
        shown = {kind: int((kind_P == kind).sum()) for kind in self.count_of}
        return ", ".join(f"{kind} {count} of {self.count_of[kind]}" for kind, count in shown.items() if count)

    def said(self, point: int) -> str:
        """Return how the point's text begins; "" where texts are not known."""
        return beginning(self.texts[point])


@dataclass(frozen=True)
class Plane:
    """One map: which points, where they lie, and what that means; the pairs of chosen points that are most alike."""

    title: str
    note: str
    axes: tuple[str, str]
    point_M: np.ndarray
    place_M2: np.ndarray
    alike: list[tuple[int, int, float]]


def points_of(viewed: Viewed, pool: Artifact | None, target: Artifact | None, rng: np.random.Generator) -> Points:
    """Draw the points, kind by kind. Texts of a point's whole length are not kept: the first `LONGEST` characters."""
    texts = {name: None if given is None else given.table() for name, given in (("pool", pool), ("target", target))}
    target_rows = 0 if texts["target"] is None else texts["target"].num_rows
    all_of = {
        "pool": viewed.rejected(),
        "dropped as noise": viewed.dropped_D,
        "chosen": viewed.row_S,
        "target": np.arange(target_rows),
    }
    kinds, rows, ids, said = [], [], [], []
    for kind, every in all_of.items():
        drawn = np.sort(rng.permutation(len(every))[: MOST[kind]])
        examples: pa.Table | None = texts["target" if kind == "target" else "pool"]
        column = viewed.pool.ids if kind != "target" or examples is None else examples.column("example_id")
        found = [str(column[row].as_py()) for row in every[drawn].tolist()]
        ids += found
        said += [text_of(examples, name)[:LONGEST] if examples is not None else "" for name in found]
        kinds += [kind] * len(drawn)
        rows.append(every[drawn])
    counts = {kind: len(every) for kind, every in all_of.items()}
    return Points(np.array(kinds), np.concatenate(rows).astype(np.int64), ids, said, counts)


def planes_of(viewed: Viewed, points: Points) -> list[Plane]:
    """Return the maps that the numbers allow, the one that selectors see first."""
    found = []
    features = viewed.pool.features
    if features is not None:
        some = np.flatnonzero((points.kind_M != "target") & np.isin(points.row_M, features.rows_F))
        fits = max(2, MOST_BYTES // (4 * features.dimensions))
        some = some[np.linspace(0, len(some) - 1, fits).astype(np.int64)] if len(some) > fits else some
        if len(some):
            unit = unit_rows(features.matrix(points.row_M[some]))
            note = "the features that scoring left, each at length one; the target has none"
            found.append(_plane("features", note, points, some, unit))
    if any(points.texts):
        some = np.array([point for point, text in enumerate(points.texts) if text])
        note = "hashed words and word pairs, tf–idf"
        found.append(_plane("texts", note, points, some, hashed_rows([points.texts[point] for point in some.tolist()])))
    if not found and viewed.pool.lengths_N is not None and viewed.pool.score_N is not None:
        own = np.flatnonzero(points.kind_M != "target")
        row = points.row_M[own]
        some = own[np.isfinite(viewed.pool.score_N[row])]
        row = points.row_M[some]
        place = np.stack([viewed.pool.lengths_N[row], viewed.pool.score_N[row]], axis=1).astype(np.float64)
        note = "there are neither features nor texts"
        found.append(Plane("Map: score against length", note, ("tokens", "score"), some, place, []))
    return found


def _plane(what: str, note: str, points: Points, some: np.ndarray, row_MK: Any) -> Plane:
    place_M2, held = principal_plane(row_MK)
    chosen = np.flatnonzero(points.kind_M[some] == "chosen")
    pairs = closest_pairs(row_MK[chosen]) if len(chosen) > 1 else []
    alike = [(int(some[chosen[left]]), int(some[chosen[right]]), cosine) for left, right, cosine in pairs]
    said = f"first two principal components of {note}; they hold {held:.0%} of the variance"
    return Plane(f"Map of {what}", said, ("component 1", "component 2"), some, place_M2, alike)
