"""The evidence that gates judge: per-item outcomes of base, champion and candidate, and where training met the holdout.

Reads the `evaluation` table as it is and says plainly what is missing; a number that is not finite is never dropped.
Pairing is by item: two models are compared only on a suite where both have an outcome for every item of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stages.text.overlap import Meeting

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outcomes:
    """One model's outcomes on one suite, sorted by item; NaN where the table has null or NaN.

    `measured` counts the items that the table gives a value for, whatever it is.
    """

    item_ids: tuple[str, ...]
    sources: NDArray[np.str_]
    value_N: Floats
    weight_N: Floats
    measured: int

    def __len__(self) -> int:
        return len(self.item_ids)

    @property
    def finite(self) -> bool:
        """Whether every measured value is finite and something was measured."""
        return self.measured > 0 and int(np.isfinite(self.value_N).sum()) == self.measured


@dataclass(frozen=True)
class Evidence:
    """All that a gate may look at.

    Args:
        evaluation: an `evaluation` table.
        meetings: holdout items met by training rows.
        holdout_items: how many items the holdout has.
        training_rows: how many selected rows were looked at for contamination.
        champion: whether there is a champion to compare with.
    """

    evaluation: pa.Table
    meetings: Sequence[Meeting] = ()
    holdout_items: int = 0
    training_rows: int = 0
    champion: bool = False
    _cache: dict[tuple[str, str, str], Outcomes] = field(default_factory=dict, repr=False)

    def outcomes(self, suite: str, model: str, value: str = "loss") -> Outcomes:
        """Return a model's outcomes on a suite; empty where there are none.

        Args:
            value: "loss" gives nats (values) over answer tokens (weights); "score" gives scores with weight 1.
        """
        key = (suite, model, value)
        if key not in self._cache:
            table = self.evaluation
            rows = table.filter(pc.and_(pc.equal(table.column("suite"), suite), pc.equal(table.column("model"), model)))
            name = "loss_sum" if value == "loss" else "score"
            column = rows.column(name)
            weights = rows.column("answer_tokens") if value == "loss" else pa.chunked_array([np.ones(rows.num_rows)])
            self._cache[key] = Outcomes(
                tuple(rows.column("item_id").to_pylist()),
                np.asarray(rows.column("source").to_pylist(), dtype=np.str_),
                pc.fill_null(column, float("nan")).to_numpy().astype(np.float64),
                weights.to_numpy().astype(np.float64),
                rows.num_rows - column.null_count,
            )
        return self._cache[key]


@dataclass(frozen=True)
class Pair:
    """Two models' outcomes on the items that both have a value for, or why they cannot be compared."""

    before: Outcomes
    after: Outcomes
    problem: str
    scarce: bool = False
    """Whether the problem is that too little was seen, rather than that something is wrong."""


def pair(evidence: Evidence, suite: str, value: str, before: str, after: str, least_items: int) -> Pair:
    """Return two models' outcomes side by side; `problem` is "" where they can be compared.

    Items without evidence (null) in both are left out, and must leave `least_items`. An outcome that is not finite, an
    item that only one model has evidence on, and a suite without outcomes are problems.
    """
    first, second = (evidence.outcomes(suite, model, value) for model in (before, after))
    for name, outcomes in ((before, first), (after, second)):
        if not len(outcomes):
            return Pair(first, second, f"the suite {suite!r} has no outcome of {name}")
        if not outcomes.measured:
            return Pair(first, second, f"the suite {suite!r} holds no {value} of {name}")
        if not outcomes.finite:
            return Pair(first, second, f"a {value} of {name} in {suite!r} is not finite")
    if first.item_ids != second.item_ids or (np.isnan(first.value_N) != np.isnan(second.value_N)).any():
        return Pair(first, second, f"{before} and {after} did not answer the same items of {suite!r}")
    kept = np.isfinite(first.value_N) & np.isfinite(second.value_N) & (first.weight_N > 0) & (second.weight_N > 0)
    first, second = _keep(first, kept), _keep(second, kept)
    if len(first) < least_items:
        return Pair(first, second, f"{len(first)} item(s) are too few: at least {least_items} are asked for", True)
    return Pair(first, second, "")


def _keep(outcomes: Outcomes, kept: NDArray[np.bool_]) -> Outcomes:
    ids = tuple(item for item, keep in zip(outcomes.item_ids, kept.tolist(), strict=True) if keep)
    return Outcomes(ids, outcomes.sources[kept], outcomes.value_N[kept], outcomes.weight_N[kept], int(kept.sum()))
