"""The family of selectors: from the pool's ids, lengths, sources and scores to an order of preference and its prefix.

A selector sees numbers by row, never text or a model. What enters (which rows have a valid score) and what leaves (no
row twice, no row without a score where scores are read) is guarded by the stage. Torch-free. Shapes: N pool rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from data_contracts.method import Method
from stages.select.features import Features
from stages.select.quota import Quota


@dataclass(frozen=True)
class Candidates:
    """The pool as a selector sees it, rows sorted by example_id.

    Attributes:
        ids, sources: mapped columns; their text stays on disk.
        lengths_N: int32 tokens a row; None where only scores are known.
        score_N: float32, NaN where a row has no valid score; None where there are no scores.
        columns: makes `column_NJ`, called where a selector reads it; so is `verified` for `exact_N`.
        group_names: of the target groups, where they are known.
        features: those of the rows that have one; None where scoring left none.
        similarity_NN: float32, at least 0, of each row to each, where it is given in place of features.
    """

    ids: pa.ChunkedArray
    sources: pa.ChunkedArray
    lengths_N: np.ndarray | None
    score_N: np.ndarray | None
    columns: Callable[[], np.ndarray | None] | None = None
    verified: Callable[[], np.ndarray | None] | None = None
    group_names: tuple[str, ...] = ()
    features: Features | None = None
    similarity_NN: np.ndarray | None = None

    @cached_property
    def column_NJ(self) -> np.ndarray | None:  # noqa: N802
        """Float32, the score for each target group; None where there is one group or no scores."""
        return self.columns() if self.columns is not None else None

    @cached_property
    def exact_N(self) -> np.ndarray | None:  # noqa: N802
        """Bool, whether a row's score was computed rather than predicted; None where that is not known."""
        return self.verified() if self.verified is not None else None

    def __len__(self) -> int:
        return len(self.ids)

    def only(self, rows_K: np.ndarray) -> Candidates:
        """Return these rows alone, ascending, as a pool of their own; copies their ids, sources and numbers."""
        taken = pa.array(rows_K)
        similarity_NN = self.similarity_NN
        return Candidates(
            self.ids.take(taken),
            self.sources.take(taken),
            None if self.lengths_N is None else self.lengths_N[rows_K],
            None if self.score_N is None else self.score_N[rows_K],
            lambda: None if self.column_NJ is None else self.column_NJ[rows_K],
            lambda: None if self.exact_N is None else self.exact_N[rows_K],
            self.group_names,
            None if self.features is None else self.features.only(rows_K),
            None if similarity_NN is None else similarity_NN[np.ix_(rows_K, rows_K)],
        )

    def usable(self, reads: frozenset[str]) -> np.ndarray:
        """Return the row numbers that have what is read, ascending."""
        rows = self.scorable if reads & {"scores", "groups"} else np.arange(len(self))
        if "groups" in reads and self.column_NJ is not None:  # a row that a coverage left out has none
            rows = rows[np.isfinite(self.column_NJ[rows]).all(axis=1)]
        if "features" not in reads or self.similarity_NN is not None:
            return rows
        return np.intersect1d(rows, self.features.rows_F, assume_unique=True) if self.features else rows[:0]

    @property
    def scorable(self) -> np.ndarray:
        """Row numbers with a finite score, ascending; all rows where there are no scores."""
        if self.score_N is None:
            return np.arange(len(self))
        return np.flatnonzero(np.isfinite(self.score_N))


@dataclass(frozen=True)
class Choice:
    """What a selector chose, best first.

    Attributes:
        rows: int64 row numbers, none twice.
        gain: float32 value of the selector's objective for each row; None where it has none.
        weights: float32 loss weights, 1 where None.
        repeats: int32 visits an epoch, 1 where None.
        order: int32 phase of an epoch that a row belongs to, 0 where None.
        reason: one sentence for every row; `{score}`, `{rank}`, `{gain}` and `{group}` are filled in.
        group: int64 number of the group that each row was taken for; None where there are none.
        groups: what the groups are called; by their numbers, from 1, where empty.
        short: why fewer rows were chosen than the quota allows; "" where it is full or the pool ended.
    """

    rows: np.ndarray
    gain: np.ndarray | None = None
    weights: np.ndarray | None = None
    repeats: np.ndarray | None = None
    order: np.ndarray | None = None
    reason: str = ""
    group: np.ndarray | None = None
    groups: Sequence[str] = ()
    short: str = ""

    def first(self, count: int) -> Choice:
        """Return the first `count` rows, with what is told of each."""

        def cut(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[:count]

        return replace(
            self,
            rows=self.rows[:count],
            gain=cut(self.gain),
            weights=cut(self.weights),
            repeats=cut(self.repeats),
            order=cut(self.order),
            group=cut(self.group),
        )


class Selector(Method):
    """One way of choosing rows."""

    family: ClassVar[str] = "selectors"
    home: ClassVar[str] = "stages.select.methods"
    reads: ClassVar[frozenset[Literal["scores", "groups", "features"]]] = frozenset()
    """What it cannot do without (`groups`: a score a target group); rows that lack it are kept from the selector."""

    def needs(self) -> frozenset[str]:
        """Return what it cannot do without as it is set; `reads`, unless a setting reads more."""
        return self.reads

    def select(self, pool: Candidates, quota: Quota, rng: np.random.Generator) -> Choice:
        """Return the chosen rows. `rng` depends on the configured seed alone."""
        raise TypeError(f"{type(self).__name__} defines no select")
