"""What a selection is made of, in numbers: composition against the pool, what the target groups get, near misses.

Every count is of the whole pool and of the chosen pool rows (rows of the target that are added stand outside both).
Torch-free. Held: a few numbers a row. Shapes: N pool rows, S chosen, J target groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.records import Table
from stages.select.selector import Candidates

SHOWN = 10
SOURCES_SHOWN = 20
LENGTH_BINS = 10


@dataclass(frozen=True)
class Viewed:
    """The pool with what was chosen from it, best first, what a noise filter kept from it, and the groups' names."""

    pool: Candidates
    row_S: np.ndarray
    gain_S: np.ndarray
    dropped_D: np.ndarray
    groups: tuple[str, ...]

    def columns(self) -> np.ndarray | None:
        """Return worth_NJ: the score for each group, or the one score; None without scores."""
        if self.pool.column_NJ is not None:
            return self.pool.column_NJ
        return None if self.pool.score_N is None else self.pool.score_N[:, None]

    def rejected(self) -> np.ndarray:
        """Return the rows that could have been chosen and were not, ascending."""
        out_N = np.ones(len(self.pool), dtype=bool)
        out_N[self.row_S] = False
        out_N[self.dropped_D] = False
        return np.flatnonzero(out_N)


def group_names(pool: Candidates) -> tuple[str, ...]:
    """Return the names of the target groups: the target's sources, sorted as scoring has them, or numbers."""
    if pool.column_NJ is None:
        return () if pool.score_N is None else ("target",)
    count, names = pool.column_NJ.shape[1], pool.group_names
    return names if len(names) == count else tuple(f"group {number}" for number in range(1, count + 1))


def by_source(viewed: Viewed) -> Table:
    """Return rows and chosen rows of each source, the largest first; the others together in the last line."""
    sources = viewed.pool.sources
    pool, taken = _counts(sources), _counts(sources.take(pa.array(viewed.row_S)))
    order = sorted(pool, key=lambda source: (-pool[source], -taken.get(source, 0), source))
    rows = [(source, pool[source], taken.get(source, 0)) for source in order[:SOURCES_SHOWN]]
    if rest := order[SOURCES_SHOWN:]:
        rows.append((f"{len(rest)} more", sum(pool[s] for s in rest), sum(taken.get(s, 0) for s in rest)))
    return _composition("source", rows)


def by_length(viewed: Viewed) -> Table | None:
    """Return rows and chosen rows by tokens, in tenths of the pool's rows; None where lengths are not known."""
    length_N = viewed.pool.lengths_N
    if length_N is None:
        return None
    quantiles = np.quantile(length_N, np.linspace(0, 1, LENGTH_BINS + 1), method="inverted_cdf")
    start_B = np.unique(quantiles)[:-1] if len(np.unique(quantiles)) > 1 else quantiles[:1]
    pool_B, taken_B = (
        np.bincount(np.searchsorted(start_B, values, side="right") - 1, minlength=len(start_B))
        for values in (length_N, length_N[viewed.row_S])
    )
    ends = [*(start_B[1:] - 1).tolist(), int(length_N.max())]
    names = [f"{int(low)}–{int(high)} tokens" for low, high in zip(start_B, ends, strict=True)]
    return _composition("length", list(zip(names, pool_B.tolist(), taken_B.tolist(), strict=True)))


def by_group(viewed: Viewed) -> Table | None:
    """Return rows and chosen rows by the target group that they serve best; None with fewer than two groups.

    Best is the largest number of deviations above the group's mean over the pool, so that scales do not count.
    """
    column_NJ = viewed.pool.column_NJ
    if column_NJ is None:
        return None
    known = np.flatnonzero(np.isfinite(column_NJ).all(axis=1))
    known_KJ = column_NJ[known].astype(np.float64)
    spread_J = known_KJ.std(axis=0)
    best_N = np.full(len(column_NJ), -1)
    best_N[known] = ((known_KJ - known_KJ.mean(axis=0)) / np.where(spread_J > 0, spread_J, 1.0)).argmax(axis=1)
    rows = [
        (name, int((best_N == group).sum()), int((best_N[viewed.row_S] == group).sum()))
        for group, name in enumerate(viewed.groups)
    ]
    return _composition("group", rows)


def coverage(viewed: Viewed) -> Table | None:
    """Return what each target group gets; None without scores.

    Share of the positive score mass: Σ over the chosen of max(score, 0) by Σ over the pool. Share of its best: how many
    of the group's S best rows are among the S viewed.
    """
    column_NJ = viewed.columns()
    if column_NJ is None:
        return None
    rows = []
    for group, name in enumerate(viewed.groups):
        value_N = column_NJ[:, group].astype(np.float64)
        mass_N = np.where(np.isfinite(value_N), np.maximum(value_N, 0), 0.0)
        known = np.flatnonzero(np.isfinite(value_N))
        best = known[np.argsort(-value_N[known], kind="stable")][: len(viewed.row_S)]
        held = float(mass_N[viewed.row_S].sum() / mass_N.sum()) if mass_N.sum() > 0 else None
        found = float(np.isin(best, viewed.row_S).mean()) if len(best) else None
        rows.append((name, _rounded(held), _rounded(found)))
    return Table(
        title="Coverage of target groups",
        columns=("group", "share of positive score", f"share of its best {len(viewed.row_S)} rows"),
        rows=tuple(rows),
    )


def nearest_rejected(viewed: Viewed) -> np.ndarray:
    """Return the rows that were not chosen with the highest scores, best first; empty without scores."""
    score_N = viewed.pool.score_N
    if score_N is None:
        return np.zeros(0, dtype=np.int64)
    rows = viewed.rejected()
    rows = rows[np.isfinite(score_N[rows])]
    return np.asarray(rows[np.argsort(-score_N[rows], kind="stable")][:SHOWN])


def closest_pairs(row_BK: np.ndarray, count: int = SHOWN) -> list[tuple[int, int, float]]:
    """Return the (first, second, cosine) of the most alike pairs of rows, closest first, dense or sparse at length one.

    A block of rows is compared with all before it; rows of zeros are like nothing.
    """
    best: list[tuple[float, int, int]] = []
    for start in range(0, row_BK.shape[0], 256):
        block = row_BK[start : start + 256] @ row_BK[: start + 256].T
        cosine_bB = np.asarray(block.todense() if hasattr(block, "todense") else block)
        here_b, other_b = np.nonzero(np.arange(cosine_bB.shape[1]) < start + np.arange(len(cosine_bB))[:, None])
        value = cosine_bB[here_b, other_b]
        top = np.argsort(-value, kind="stable")[:count]
        best += [(-float(value[at]), int(other_b[at]), int(start + here_b[at])) for at in top.tolist()]
        best = sorted(best)[:count]
    return [(first, second, -minus) for minus, first, second in best]


def _composition(what: str, rows: list[tuple[str, int, int]]) -> Table:
    return Table(title=f"Composition by {what}", columns=(what, "in the pool", "chosen"), rows=tuple(rows))


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {str(row["values"]): int(row["counts"]) for row in pc.value_counts(column).to_pylist()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
