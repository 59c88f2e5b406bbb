"""The stage's table: each row's final score, the columns of the pass that computed it, and why a row has none.

Written in the pool's order, a stretch of rows in memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data_contracts.errors import MethodError
from data_contracts.tables import FEATURES, SCORES
from stages.score.cover import Covered
from stages.score.features import stored
from stages.score.pool import ScoredPool
from stages.stage import Work

STRETCH = 2048


@dataclass(frozen=True)
class Written:
    """What was written: quarantined rows by reason, how many rows are exact, and each row's mean loss (NaN: none)."""

    reasons: dict[str, int]
    exact: int
    loss_N: np.ndarray


def write_scores(pool: ScoredPool, covered: Covered, final_N: np.ndarray, work: Work) -> Written:
    """Write `scores`, the quarantine and the features kept.

    Raises `MethodError` where no row has a score.
    """
    reasons: dict[str, int] = {}
    exact = 0
    loss_N = np.full(len(pool), np.nan, dtype=np.float32)
    with ExitStack() as files:
        writer = files.enter_context(work.writer("scores"))
        features = files.enter_context(work.writer("features")) if pool.method.keeps_features else None
        for start in range(0, len(pool), STRETCH):
            stop = min(start + STRETCH, len(pool))
            part = _Stretch(pool, covered, final_N, start, stop)
            writer.extend(part.table())
            exact += int(part.exact.sum())
            loss_N[start:stop] = np.array(part.loss, dtype=np.float32)  # None is NaN
            if features is not None:
                features.extend(part.features())
            for example_id, reason, detail in part.refused():
                reasons[reason] = reasons.get(reason, 0) + 1
                work.quarantine(split="pool", reason=reason, detail=detail, example_id=example_id, field="score")
    if sum(reasons.values()) == len(pool):
        counted = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
        raise MethodError(
            f"scorer {pool.method.name()} scores at least one row",
            f"none of {len(pool)} could be scored ({counted})",
            "look at the model's loss on the pool, or choose another scorer",
        )
    return Written(reasons, exact, loss_N)


class _Stretch:
    """Rows `start` to `stop` of the result."""

    def __init__(self, pool: ScoredPool, covered: Covered, final_N: np.ndarray, start: int, stop: int) -> None:
        count = stop - start
        self.rows = pool.table.slice(start, count)
        self.score = final_N[start:stop]
        self.usable = np.isfinite(self.score)
        self.exact = np.zeros(count, dtype=bool)
        self.loss: list[float | None] = [None] * count
        self.groups: list[list[float]] = [[] for _ in range(count)]
        self.why: list[tuple[str, str]] = [("", "")] * count
        self.found: list[tuple[np.ndarray, pa.Table]] = []
        if covered.predicted_NJ is not None:
            columns = covered.predicted_NJ[start:stop]
            for index in np.flatnonzero(np.isfinite(columns).all(axis=1)).tolist():
                self.groups[index] = columns[index].tolist()
        for made in pool.passes:
            own = made.method is pool.method
            for rows, found in made.between(start, stop):
                self._take(rows - start, found, own)
                if own and pool.method.keeps_features:
                    self.found.append((rows, found))

    def _take(self, places: np.ndarray, found: pa.Table, own: bool) -> None:
        columns = {name: found.column(name).to_pylist() for name in ("group_scores", "loss", "reason", "detail")}
        for index, at in enumerate(places.tolist()):
            if columns["reason"][index]:
                self.why[at] = columns["reason"][index], columns["detail"][index]
            if own:
                self.loss[at], self.groups[at] = columns["loss"][index], columns["group_scores"][index]
                self.exact[at] = bool(self.usable[at]) and not columns["reason"][index]

    def table(self) -> pa.Table:
        """Return the rows as a table of the contract."""
        score = pa.array(self.score, type=pa.float32(), mask=~self.usable)
        made = {"score": score, "group_scores": self.groups, "loss": self.loss, "exact": self.exact}
        arrays = [
            pa.array(made[name], type=field.type) if name in made else self.rows.column(name).combine_chunks()
            for name, field in ((field.name, field) for field in SCORES.schema)
        ]
        return pa.Table.from_arrays(arrays, schema=SCORES.schema)

    def features(self) -> pa.Table:
        """Return the features of the computed rows, in the pool's order; there may be none in a stretch."""
        if not self.found:
            return FEATURES.schema.empty_table()
        table = pa.concat_tables([found for _, found in self.found])
        order = np.argsort(np.concatenate([places for places, _ in self.found]), kind="stable")
        return stored(table.take(pa.array(order)))

    def refused(self) -> list[tuple[str, str, str]]:
        """Return (example_id, reason, detail) of each row without a score."""
        ids, found = self.rows.column("example_id"), []
        for index in np.flatnonzero(~self.usable).tolist():
            reason, detail = self.why[index]
            found.append(
                (
                    ids[index].as_py(),
                    reason or "score_not_finite",
                    detail or "its score over the whole pool is not a number",
                )
            )
        return found
